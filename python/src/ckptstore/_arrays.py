"""Arrays that tensors are read into: PyTorch's, or numpy's where there is no PyTorch."""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Sequence
from typing import Any

SIZES = {
    "bool": 1, "uint8": 1, "int8": 1, "uint16": 2, "int16": 2, "uint32": 4, "int32": 4, "uint64": 8, "int64": 8,
    "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "complex32": 4, "complex64": 8, "complex128": 16,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e8m0fnu": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1,
}
"""Bytes of an element, by the names of the types that a store keeps."""

_NOT_NUMPY = ("bfloat16", "complex32", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float8_e4m3fnuz", "float8_e5m2fnuz")


def kind() -> str:
    """``torch`` if it can be imported, else ``numpy``."""
    return "torch" if importlib.util.find_spec("torch") is not None else "numpy"


def empty(kind: str, fqn: str, dtype: str, shape: Sequence[int]) -> tuple[Any, memoryview]:
    """An array of that kind, and its bytes to be written, row by row.

    Raises TypeError, naming the tensor, for a dtype that the kind has not.
    """
    return _torch(fqn, dtype, shape) if kind == "torch" else _numpy(fqn, dtype, shape)


def _torch(fqn: str, dtype: str, shape: Sequence[int]) -> tuple[Any, memoryview]:
    import torch

    of = getattr(torch, dtype, None)
    if of is None:
        raise TypeError(f"tensor {fqn!r} is {dtype}, which this PyTorch ({torch.__version__}) has not: upgrade it, or give a dtype to convert to")
    out = torch.empty(tuple(shape), dtype=of, device="cpu")
    size = out.numel() * out.element_size()
    if size == 0:
        return out, memoryview(bytearray())
    # The tensor outlives the view: fetch has ended before it is handed out.
    return out, memoryview((ctypes.c_char * size).from_address(out.data_ptr())).cast("B")


def _numpy(fqn: str, dtype: str, shape: Sequence[int]) -> tuple[Any, memoryview]:
    if dtype in _NOT_NUMPY:
        raise TypeError(f"tensor {fqn!r} is {dtype}, which numpy has not: read it with PyTorch, or give dtype='float32' to convert it")
    try:
        import numpy
    except ImportError as error:
        raise ImportError(f"tensor {fqn!r}: neither PyTorch nor numpy is installed to hold it; install one of them") from error
    out: Any = numpy.empty(tuple(shape), dtype="bool" if dtype == "bool" else dtype)
    return out, out.reshape(-1).view("uint8").data
