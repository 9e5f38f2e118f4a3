"""Computes short digests of tensors: of all bytes up to 1 MiB, of 256 samples above that.

They detect replicas that differ, and frozen tensors that have changed. They do not detect
a change that lies between two samples.
"""

from __future__ import annotations

import ctypes
import hashlib
import struct

import torch

FULL = 1 << 20  # bytes up to which the digest covers the whole tensor
SAMPLE = 4 << 10
COUNT = FULL // SAMPLE


def of_bytes(data: bytes) -> str:
    """Return the digest of a value, for an item's check."""
    return _digest(len(data), [data])


def of_tensor(tensor: torch.Tensor) -> str:
    """Return the digest of a tensor's bytes in row-major order, for an item's check."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    size = flat.numel() * flat.element_size()
    if size == 0:
        return _digest(0, [])
    if flat.device.type != "cpu":
        raw = flat.view(torch.uint8)
        flat = (raw if size <= FULL else torch.cat([raw[at : at + SAMPLE] for at in _places(size)])).cpu()
        data = memoryview((ctypes.c_char * flat.numel()).from_address(flat.data_ptr())).cast("B")
        return _digest(size, [data])
    data = memoryview((ctypes.c_char * size).from_address(flat.data_ptr())).cast("B")
    return _digest(size, [data] if size <= FULL else [data[at : at + SAMPLE] for at in _places(size)])


def _places(size: int) -> list[int]:
    """Return the offsets of a large tensor's samples, from its first byte to its last."""
    step = (size - SAMPLE) // (COUNT - 1)
    return [step * i for i in range(COUNT - 1)] + [size - SAMPLE]


def _digest(size: int, parts: list[bytes] | list[memoryview]) -> str:
    h = hashlib.sha256(struct.pack("<Q", size))
    for part in parts:
        h.update(part)
    return h.hexdigest()[:32]
