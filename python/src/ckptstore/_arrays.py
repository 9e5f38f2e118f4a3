"""Allocates the arrays that tensors are read into, of PyTorch or, without it, of numpy."""

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
"""Bytes of an element, by dtype name. A store keeps these dtypes."""

_NOT_NUMPY = ("bfloat16", "complex32", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float8_e4m3fnuz", "float8_e5m2fnuz")


def kind() -> str:
    """Return ``torch`` if it can be imported, else ``numpy``."""
    return "torch" if importlib.util.find_spec("torch") is not None else "numpy"


def empty(kind: str, fqn: str, dtype: str, shape: Sequence[int]) -> tuple[Any, memoryview]:
    """Return an array of that kind, and a writable view of its bytes in row-major order.

    Raises:
        TypeError: the kind does not support the dtype. The text names the tensor.
    """
    return _torch(fqn, dtype, shape) if kind == "torch" else _numpy(fqn, dtype, shape)


def _torch(fqn: str, dtype: str, shape: Sequence[int]) -> tuple[Any, memoryview]:
    import torch

    of = getattr(torch, dtype, None)
    if of is None:
        raise TypeError(f"tensor {fqn!r} is {dtype}, which this PyTorch ({torch.__version__}) does not support: upgrade it, or pass dtype= to convert")
    out = torch.empty(tuple(shape), dtype=of, device="cpu")
    size = out.numel() * out.element_size()
    if size == 0:
        return out, memoryview(bytearray())
    # The tensor outlives the view: fetch ends before the caller gets the tensor.
    return out, memoryview((ctypes.c_char * size).from_address(out.data_ptr())).cast("B")


def _numpy(fqn: str, dtype: str, shape: Sequence[int]) -> tuple[Any, memoryview]:
    if dtype in _NOT_NUMPY:
        raise TypeError(f"tensor {fqn!r} is {dtype}, which numpy does not support: read it with PyTorch, or pass dtype='float32' to convert")
    try:
        import numpy
    except ImportError as error:
        raise ImportError(f"tensor {fqn!r}: neither PyTorch nor numpy is installed to hold it; install one of them") from error
    out: Any = numpy.empty(tuple(shape), dtype="bool" if dtype == "bool" else dtype)
    return out, out.reshape(-1).view("uint8").data
