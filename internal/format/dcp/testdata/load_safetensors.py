"""Loads safetensors with the reference package and compares each with its SUMS.json.

PATH is a single .safetensors file, or a Hugging Face directory: one file
named model.safetensors, or model.safetensors.index.json and the files that it
names. The index must name each tensor of each file once, and the right total.
Prints one line of JSON for each; exit code 1 on any difference, each of which is a line
on standard error. Values other than tensors have no place in this format.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import sums
import torch
from safetensors import SafetensorError, safe_open

INDEX = "model.safetensors.index.json"


def parts(path: Path) -> tuple[list[Path], dict[str, str] | None, int]:
    """The files, where the index says a tensor is, and its total in bytes."""
    if path.is_file():
        return [path], None, -1
    index = path / INDEX
    if not index.is_file():
        single = path / "model.safetensors"
        if not single.is_file():
            raise SystemExit(f"{path}: neither {INDEX} nor model.safetensors in it")
        return [single], None, -1
    try:
        said = json.loads(index.read_text())
        where, total = said["weight_map"], said["metadata"]["total_size"]
    except (OSError, ValueError, KeyError, TypeError) as err:
        raise SystemExit(f"read {index}: {err!r}") from err
    return [path / name for name in sorted(set(where.values()))], where, total


def check(path: Path, sums_file: Path) -> int:
    """The number of differences, each told on standard error."""
    if not path.exists():
        print(f"{path}: not there", file=sys.stderr)
        return 1
    want = {"tensors": sums.read(sums_file)["tensors"]}
    files, where, total = parts(path)
    if path.is_dir():
        stray = {p.name for p in path.glob("*.safetensors")} - {p.name for p in files}
        if stray:
            raise SystemExit(f"{path}: files that the index does not name: {', '.join(sorted(stray))}")

    state: dict[str, torch.Tensor] = {}
    bad = []
    for file in files:
        try:
            with safe_open(file, framework="pt") as f:
                if len(files) > 1 and (f.metadata() or {}).get("format") != "pt":
                    bad.append(f'{file.name}: __metadata__ is {f.metadata()}, want format "pt"')
                for key in f.keys():
                    if where is not None and where.get(key) != file.name:
                        bad.append(f"tensor {key!r} is in {file.name}, the index says {where.get(key)}")
                    if key in state:
                        bad.append(f"tensor {key!r} is in {file.name} and in a file before it")
                    state[key] = f.get_tensor(key)
        except (OSError, SafetensorError) as err:
            raise SystemExit(f"open {file}: {err}") from err
    size = sum(t.numel() * t.element_size() for t in state.values())
    if where is not None:
        bad += [f"tensor {key!r} is in the index and in no file" for key in sorted(where.keys() - state.keys())]
        if total != size:
            bad.append(f"the index says {total} bytes in all, the tensors have {size}")
    bad += sums.compare(state, want, "safetensors")
    for line in bad:
        print(f"{path}: {line}", file=sys.stderr)
    report = {"path": str(path), "files": len(files), "tensors": len(state), "bytes": size, "differences": len(bad)}
    print(json.dumps(report), flush=True)
    return len(bad)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "pairs",
        type=Path,
        nargs="+",
        metavar="PATH SUMS.json",
        help="a file or Hugging Face directory, and what must be in it, as make_fixture.py says it",
    )
    given = parser.parse_args()
    if len(given.pairs) % 2:
        parser.error("want pairs of a path and a SUMS.json")
    bad = sum(check(*pair) for pair in zip(given.pairs[::2], given.pairs[1::2], strict=True))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
