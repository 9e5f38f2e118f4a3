"""Values that are not tensors, as bytes and back. The bytes are those of torch.save."""

from __future__ import annotations

import io
from typing import Any

import torch


def encode(fqn: str, value: Any) -> bytes:
    """The bytes of a value."""
    out = io.BytesIO()
    try:
        torch.save(value, out)
    except Exception as error:
        raise ValueError(f"value {fqn!r}, a {type(value).__name__}, cannot be pickled: {error}") from error
    return out.getvalue()


def decode(fqn: str, data: bytes) -> Any:
    """The value of bytes."""
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
