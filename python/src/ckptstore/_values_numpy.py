"""Rebuilds numpy's arrays, scalars and dtypes from the bytes of a pickle.

numpy's own ``__setstate__`` trusts its state: with forged flags of a dtype, numpy takes
bytes of the pickle for pointers to Python objects. So no data of a pickle reaches numpy's
functions. This unpickler checks the arguments, builds the dtype from its code, and reads
the elements with ``numpy.frombuffer``.

It supports dtypes of booleans, integers, floats, complex numbers, dates, time differences
and text of a fixed length. It refuses objects, records and subarrays.
"""

from __future__ import annotations

import importlib
import math
import pickle
import re
import reprlib
import types
from collections.abc import Callable
from typing import Any, ClassVar


class NotPlain(Exception):
    """A numpy object is refused. The text names it and the next step."""


_ADVICE = "save a list or a dict of plain arrays in its place, or, if you trust everyone who can write to the store, load it with unsafe_pickle=True"

_PLAIN = re.compile(r"b1|[iu][1248]|f(2|4|8|12|16)|c(8|16|24|32)|[Mm]8|[SU][0-9]{1,9}")
_UNITS = ("generic", "Y", "M", "W", "D", "h", "m", "s", "ms", "us", "ns", "ps", "fs", "as")
_LAST_CHARACTER = 0x10FFFF

_DISPATCH: dict[int, Any] = dict(pickle._Unpickler.dispatch)


def _numpy() -> types.ModuleType:
    try:
        return importlib.import_module("numpy")
    except ImportError as error:
        raise NotPlain("an object of numpy, which is not installed: install numpy") from error


class _Name:
    """A name of numpy in a pickle. It cannot be called, so no opcode reaches numpy through it."""

    def __init__(self, text: str, call: Callable[..., Any] | None):
        self.text, self.call = text, call


class Unbuilt:
    """An array or a dtype whose state follows in the pickle."""

    def __init__(self, text: str, finish: Callable[[Any], Any]):
        self.text, self.finish = text, finish
        self.made: Any = None


class _Memo(dict[int, Any]):
    """The memo of an unpickler. It returns the finished object of an :class:`Unbuilt`."""

    def __init__(self, reader: Unpickler):
        super().__init__()
        self.reader = reader

    def __getitem__(self, key: int) -> Any:
        found = super().__getitem__(key)
        if isinstance(found, _Name):
            self.reader.loose += 1
        if isinstance(found, Unbuilt):
            if found.made is None:
                raise ValueError(f"{found.text} is used before its state is known")
            return found.made
        return found


class Unpickler(pickle._Unpickler):
    """An unpickler that rebuilds numpy's objects itself.

    A subclass's ``find_class`` asks :meth:`find_numpy` first.
    """

    stack: list[Any]
    dispatch: ClassVar[Any] = {
        **_DISPATCH,
        pickle.REDUCE[0]: lambda self: self.load_reduce(),
        pickle.BUILD[0]: lambda self: self.load_build(),
    }

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.memo = _Memo(self)
        self.loose = 0  # names that no opcode has used yet, and unbuilt objects

    def load(self) -> Any:
        value = super().load()
        if self.loose != 0:
            raise NotPlain(f"a class of numpy, or an array or dtype without its state: {_ADVICE}")
        return value

    def find_numpy(self, module: str, name: str) -> _Name | None:
        """Return the stand-in for a name of numpy's pickles, or None."""
        if (module, name) not in _NAMES:
            return None
        _numpy()
        self.loose += 1
        return _Name(f"{module}.{name}", _NAMES[module, name])

    def load_reduce(self) -> None:
        name = self.stack[-2]
        if not isinstance(name, _Name):
            _DISPATCH[pickle.REDUCE[0]](self)
            return
        args = self.stack.pop()
        self.loose -= 1
        if name.call is None or type(args) is not tuple:
            raise NotPlain(f"a call of {name.text} with arguments of its own: {_ADVICE}")
        if name.call is _reconstruct:
            self.loose -= 1  # of its class
        made = name.call(*args)
        if isinstance(made, Unbuilt):
            self.loose += 1
        self.stack[-1] = made

    def load_build(self) -> None:
        unbuilt = self.stack[-2]
        if any(base.__module__.partition(".")[0] == "numpy" for base in type(unbuilt).__mro__):
            raise NotPlain(f"a state for a finished numpy {type(unbuilt).__name__}: {_ADVICE}")
        if not isinstance(unbuilt, Unbuilt):
            _DISPATCH[pickle.BUILD[0]](self)
            return
        state = self.stack.pop()
        unbuilt.made = self.stack[-1] = unbuilt.finish(state)
        self.loose -= 1


def _dtype(code: str, *_: Any) -> Unbuilt:
    """Return ``numpy.dtype(code)``, whose state has byte order and unit."""
    if not _PLAIN.fullmatch(code):
        kind = {"O": "objects", "V": "records or subarrays"}.get(code[:1], "neither numbers nor text")
        raise NotPlain(f"a numpy dtype {code[:40]!r}, whose elements are {kind}: {_ADVICE}")
    return Unbuilt(f"numpy dtype {code!r}", lambda state: _dtype_of(code, state))


def _dtype_of(code: str, state: Any) -> Any:
    numpy = _numpy()
    wrong = ValueError(f"numpy dtype {code!r} has the state {reprlib.repr(state)}, which is not that of a plain dtype")
    date = code[0] in "Mm"
    if type(state) is not tuple or len(state) != (9 if date else 8) or state[0] != (4 if date else 3):
        raise wrong
    order, sizes = state[1], state[5:8]
    if type(order) is not str or order not in ("<", ">", "|", "=") or any(part is not None for part in state[2:5]):
        raise wrong
    plain = numpy.dtype(code + _unit(state[8], wrong) if date else code)
    if sizes not in ((-1, -1, 0), (plain.itemsize, plain.alignment, plain.flags)):
        raise wrong
    return plain.newbyteorder(order)


def _unit(metadata: Any, wrong: ValueError) -> str:
    """Return the unit of a dtype of dates or time differences, as in ``M8[25s]``."""
    if type(metadata) is not tuple or len(metadata) != 2 or metadata[0] or type(metadata[1]) is not tuple or len(metadata[1]) != 4:
        raise wrong
    unit, count, divisor, _ = metadata[1]
    text = unit.decode("ascii", "replace") if type(unit) is bytes else unit
    if text not in _UNITS or type(count) is not int or not 0 < count < 1 << 31 or divisor != 1:
        raise wrong
    return "" if text == "generic" else f"[{count}{text}]"


def _reconstruct(of: Any, *_: Any) -> Unbuilt:
    """Return an array whose state has shape, dtype, order and bytes."""
    if not isinstance(of, _Name) or of.call is not None:
        raise NotPlain(f"a numpy array of the class {reprlib.repr(of)}: {_ADVICE}")
    return Unbuilt("numpy array", _array_of)


def _array_of(state: Any) -> Any:
    if type(state) is not tuple or len(state) != 5 or state[0] != 1:
        raise ValueError(f"a numpy array has the state {reprlib.repr(state)}")
    _, shape, dtype, fortran, data = state
    if type(data) not in (bytes, bytearray):
        raise NotPlain(f"a numpy array whose elements are a {type(data).__name__} and not bytes: {_ADVICE}")
    return _array(data, dtype, shape, "F" if fortran else "C")


def _scalar(dtype: Any, data: Any = b"") -> Any:
    if type(data) not in (bytes, bytearray):
        raise NotPlain(f"a numpy scalar that is made of a {type(data).__name__} and not of bytes: {_ADVICE}")
    if isinstance(dtype, _numpy().dtype) and dtype.itemsize == 0 and not data:
        return dtype.type()  # an empty text
    return _array(data, dtype, (), "C")[()]


def _frombuffer(buffer: Any, dtype: Any, shape: Any, order: Any, axes: Any = None) -> Any:
    """Return an array of protocol 5, whose bytes may come from outside of the pickle."""
    if not isinstance(buffer, (bytes, bytearray, memoryview, pickle.PickleBuffer)):
        raise ValueError(f"the buffer of a numpy array is a {type(buffer).__name__}")
    if axes is None and order in ("C", "F"):
        return _array(pickle.PickleBuffer(buffer).raw(), dtype, shape, order)
    if order != "K" or type(axes) is not tuple or sorted(axes) != list(range(len(shape))):
        raise ValueError(f"a numpy array has the order {reprlib.repr(order)} and the axes {reprlib.repr(axes)}")
    return _array(pickle.PickleBuffer(buffer).raw(), dtype, shape, "C").transpose(axes)


def _array(data: bytes | bytearray | memoryview, dtype: Any, shape: Any, order: str) -> Any:
    """Return an array with its own memory, from exactly the bytes that it needs."""
    numpy = _numpy()
    if not isinstance(dtype, numpy.dtype):
        raise ValueError(f"a numpy array has the dtype {reprlib.repr(dtype)}")
    elements: int = math.prod(shape)
    if len(data) != elements * dtype.itemsize:
        raise ValueError(f"a numpy array of {elements} elements of {dtype.itemsize} bytes has {len(data)} bytes")
    if elements == 0:
        return numpy.empty(shape, dtype, order)
    flat = numpy.frombuffer(data, dtype)
    _check_content(numpy, flat)
    return flat.reshape(shape, order=order).copy(order="K")


def _check_content(numpy: types.ModuleType, flat: Any) -> None:
    """Refuse bytes that are not valid elements of their dtype: numpy does not check them."""
    if flat.dtype.kind == "b" and flat.view("u1").max() > 1:
        raise ValueError("a numpy array of booleans has a byte that is neither 0 nor 1")
    if flat.dtype.kind == "U" and flat.view(numpy.dtype("u4").newbyteorder(flat.dtype.byteorder)).max() > _LAST_CHARACTER:
        raise ValueError("a numpy array of text has a character that is not in Unicode")


_NAMES: dict[tuple[str, str], Callable[..., Any] | None] = {("numpy", "ndarray"): None, ("numpy", "dtype"): _dtype}
for _core in ("numpy.core", "numpy._core"):  # of numpy 1 and of numpy 2
    _NAMES[f"{_core}.multiarray", "_reconstruct"] = _reconstruct
    _NAMES[f"{_core}.multiarray", "scalar"] = _scalar
    _NAMES[f"{_core}.numeric", "_frombuffer"] = _frombuffer
