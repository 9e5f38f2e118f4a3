"""What a checkpoint holds, in words that can be compared: for each tensor its
dtype, full shape and the SHA-256 of its contiguous little-endian bytes, for
each other value its repr. Kept as JSON:

    {"torch": "2.14.1", "world_size": 2,
     "tensors": {FQN: {"dtype": "float32", "shape": [8, 6], "sha256": HEX}},
     "values": {FQN: REPR}}
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch


def describe(tensor: torch.Tensor) -> dict[str, Any]:
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    return {
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "sha256": hashlib.sha256(data).hexdigest(),
    }


def read(path: Path) -> dict[str, Any]:
    """Raises SystemExit with a reason when path holds no such JSON."""
    try:
        sums = json.loads(path.read_text())
    except (OSError, ValueError) as err:
        raise SystemExit(f"read {path}: {err}") from err
    tensors = sums.get("tensors") if isinstance(sums, dict) else None
    if not isinstance(tensors, dict):
        raise SystemExit(f'{path}: no "tensors" in it; want the JSON that make_fixture.py writes')
    for fqn, want in tensors.items():
        if not isinstance(want, dict) or not {"dtype", "shape", "sha256"} <= want.keys():
            raise SystemExit(f"{path}: tensor {fqn!r} lacks dtype, shape or sha256")
    return sums


def compare(found: dict[str, Any], sums: dict[str, Any], how: str) -> list[str]:
    """Differences between a flat state dict and what it should be, in words.

    Values are compared where sums lists them at all: those of other programs'
    JSON may name tensors only.
    """
    bad = []
    tensors = {k: v for k, v in found.items() if isinstance(v, torch.Tensor)}
    values = {k: v for k, v in found.items() if k not in tensors}
    want_values = sums.get("values", {k: repr(v) for k, v in values.items()})
    for kind, have, want in (("tensor", tensors, sums["tensors"]), ("value", values, want_values)):
        bad += [f"{how}: {kind} {fqn!r} is missing" for fqn in sorted(want.keys() - have.keys())]
        bad += [f"{how}: {kind} {fqn!r} was not expected" for fqn in sorted(have.keys() - want.keys())]
    for fqn in sorted(tensors.keys() & sums["tensors"].keys()):
        is_, ought = describe(tensors[fqn]), sums["tensors"][fqn]
        for key in ("dtype", "shape", "sha256"):
            if is_[key] != ought[key]:
                bad.append(f"{how}: tensor {fqn!r}: {key} is {is_[key]}, want {ought[key]}")
    for fqn in sorted(values.keys() & want_values.keys()):
        if repr(values[fqn]) != want_values[fqn]:
            bad.append(f"{how}: value {fqn!r} is {values[fqn]!r}, want {want_values[fqn]}")
    return bad
