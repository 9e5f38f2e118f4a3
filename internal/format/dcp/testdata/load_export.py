"""Loads DCP directories with PyTorch and compares all of each with its SUMS.json.

Twice, single process and without a process group: with dcp.load into fresh
tensors of the dtypes and shapes that SUMS.json says, and by way of
dcp_to_torch_save, which builds the state dict from the directory's own
metadata. Prints one line of JSON
for each; exit code 1 on any difference, each of
which is a line on standard error.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import sums
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

UNREAD = "a value that nothing was read into"


def fresh(want: dict[str, Any]) -> torch.Tensor:
    """A tensor whose bytes are 0xA5, so that a region left unread shows."""
    tensor = torch.empty(want["shape"], dtype=getattr(torch, want["dtype"]))
    if tensor.numel():
        tensor.reshape(-1).view(torch.uint8).fill_(0xA5 if tensor.dtype != torch.bool else 1)
    return tensor


def load(directory: Path, want: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    metadata = dcp.FileSystemReader(directory).read_metadata()
    state: dict[str, Any] = {fqn: fresh(t) for fqn, t in want["tensors"].items()}
    bad = []
    for fqn, stored in metadata.state_dict_metadata.items():
        if not isinstance(stored, TensorStorageMetadata):
            state.setdefault(fqn, UNREAD)
            continue
        if fqn not in state:
            bad.append(f"dcp.load: tensor {fqn!r} was not expected")
            continue
        # A load converts without a word, so that only the metadata can tell.
        if stored.properties.dtype != state[fqn].dtype:
            bad.append(f"dcp.load: tensor {fqn!r} is stored as {stored.properties.dtype}, want {state[fqn].dtype}")
    missing = state.keys() - metadata.state_dict_metadata.keys()
    bad += [f"dcp.load: tensor {fqn!r} is missing" for fqn in sorted(missing)]
    state = {fqn: v for fqn, v in state.items() if fqn not in missing}
    dcp.load(state, checkpoint_id=directory)
    bad += [f"dcp.load: value {fqn!r} was not read" for fqn, v in state.items() if v is UNREAD]
    bad += [m for m in sums.compare(state, want, "dcp.load") if m not in bad]
    return state, bad


def convert(directory: Path, want: dict[str, Any]) -> list[str]:
    with tempfile.TemporaryDirectory() as temp:
        path = Path(temp) / "all.pt"
        dcp_to_torch_save(directory, path)
        # As torch itself does it: values may be of any class that it saved.
        state = torch.load(path, map_location="cpu", weights_only=False)
    flat, _ = flatten_state_dict(state)
    return sums.compare(flat, want, "dcp_to_torch_save")


def check(directory: Path, sums_file: Path) -> int:
    """The number of differences, each told on standard error."""
    want = sums.read(sums_file)
    if not (directory / ".metadata").is_file():
        print(f"{directory}: no .metadata in it; want a DCP directory", file=sys.stderr)
        return 1
    state, bad = load(directory, want)
    bad += convert(directory, want)
    for line in bad:
        print(f"{directory}: {line}", file=sys.stderr)
    tensors = [v for v in state.values() if isinstance(v, torch.Tensor)]
    values = len(state) - len(tensors)
    report = {
        "directory": str(directory),
        "torch": torch.__version__,
        "tensors": len(tensors),
        "bytes": sum(t.numel() * t.element_size() for t in tensors),
        "values": values,
        "values_compared": values if "values" in want else 0,
        "differences": len(bad),
    }
    print(json.dumps(report), flush=True)
    return len(bad)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "pairs", type=Path, nargs="+", metavar="DIR SUMS.json", help="a DCP directory, and what must be in it, as make_fixture.py says it"
    )
    given = parser.parse_args()
    if len(given.pairs) % 2:
        parser.error("want pairs of a directory and a SUMS.json")
    warnings.filterwarnings("ignore", message=".*torch.distributed is disabled")
    warnings.filterwarnings("ignore", message="ComplexHalf")
    bad = sum(check(*pair) for pair in zip(given.pairs[::2], given.pairs[1::2], strict=True))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
