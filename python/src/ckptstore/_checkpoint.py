"""``ckptstore.open``: reads tensors, slices and values of a checkpoint."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

from . import _arrays, _keys
from ._nested import nest
from ._paths import Path, received
from ._reading import BoxPart, Part, ValuePart, fetch
from ._connect import services
from ._slices import Box, box_of, whole
from ._wire import Wire
from .errors import Error


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A handle of a tensor in a checkpoint. Indexing it reads bytes.

        handle[0:2, -3:]    a box, by numpy's basic slicing
        handle[...]         the whole tensor

    Attributes:
        fqn: name in the checkpoint.
        dtype: PyTorch's name, such as ``bfloat16``.
        shape: shape of the whole tensor.
        chunks: boxes in which the tensor is stored.
        path: keys (str, or Literal for other keys) and indexes (int) that lead to it in
            the state dict.
    """

    fqn: str
    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Box, ...]
    path: Path
    _checkpoint: Checkpoint = dataclasses.field(repr=False, compare=False)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return whole(self.shape).volume * _arrays.SIZES[self.dtype]

    def __getitem__(self, index: Any) -> Any:
        return self._checkpoint.slice(self.fqn, index)


@dataclasses.dataclass(frozen=True)
class Value:
    """A value of a checkpoint: a leaf that is not a tensor.

    Attributes:
        fqn: name in the checkpoint.
        nbytes: size in bytes; the largest of a value that ranks saved separately.
        ranks: ranks that saved their own value; empty if all ranks share one.
        path: as for :class:`Tensor`.
    """

    fqn: str
    nbytes: int
    ranks: tuple[int, ...]
    path: Path


class Checkpoint:
    """A committed checkpoint, as :func:`open` returns it. It can be pickled.

    Later saves do not change it. Every byte is verified before it is returned. Damage
    raises :class:`Refused`, whose text names the file, the tensor and the block.

    Attributes:
        ref: reference in requests: ``RUN@ID``, or the path.
        id: ID in the run, or the path.
        run: the run; empty for a checkpoint of another program.
        trial: the trial; empty for a checkpoint of another program.
        name: the name; empty for a checkpoint of another program.
        step: training step; -1 for a checkpoint of another program.
        world_size: number of ranks that saved it.
        tensors: handles of the tensors, by name.
        objects: sizes and ranks of the values, by name.
        attachments: bytes of the attached files, by name.
    """

    def __init__(self, described: Mapping[str, Any], store: str | None):
        self._store, self._closed = store, False
        self.id: str = described["checkpoint"]
        self.run: str = described["run"]
        self.trial: str = described["trial"]
        self.name: str = described["name"]
        self.step: int = described["step"]
        self.world_size: int = described["world_size"]
        line = self.run if self.trial == "main" else f"{self.run}/{self.trial}"
        self.ref = f"{line}@{self.id}" if self.run else self.id
        self.tensors: Mapping[str, Tensor] = {
            fqn: Tensor(
                fqn, t["dtype"], tuple(t["shape"]), tuple(Box(tuple(c["offsets"]), tuple(c["sizes"])) for c in t["chunks"]),
                received(t.get("path") or (fqn,)), self,
            )
            for fqn, t in sorted(described["tensors"].items())
        }
        self.objects: Mapping[str, Value] = {
            fqn: Value(fqn, v["bytes"], tuple(v.get("ranks") or ()), received(v.get("path") or (fqn,)))
            for fqn, v in sorted(described["values"].items())
        }
        self.attachments: Mapping[str, int] = {a["name"]: a["size"] for a in described["attachments"]}

    def __repr__(self) -> str:
        return f"<Checkpoint {self.ref}: {len(self.tensors)} tensors, {len(self.objects)} values>"

    def keys(self) -> list[str]:
        """Return the names of all tensors and values."""
        return [*self.tensors, *self.objects]

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __len__(self) -> int:
        return len(self.tensors) + len(self.objects)

    def __contains__(self, key: object) -> bool:
        return key in self.tensors or key in self.objects

    def __getitem__(self, key: str) -> Any:
        """Return a tensor or a value.

        A tensor is PyTorch's if PyTorch is installed, else a numpy array.
        """
        return self.value(key) if key in self.objects else self.read([key])[key]

    def tensor(self, fqn: str, dtype: str | None = None) -> Any:
        """Return a whole tensor as a PyTorch tensor on the CPU.

        Args:
            fqn: name of the tensor.
            dtype: dtype to convert to; by default that of the checkpoint.
        """
        return self.read([fqn], dtype=dtype, kind="torch")[fqn]

    def numpy(self, fqn: str, dtype: str | None = None) -> Any:
        """Return a whole tensor as a numpy array.

        Args:
            fqn: name of the tensor.
            dtype: dtype to convert to; by default that of the checkpoint.

        Raises:
            TypeError: numpy does not support the dtype, such as bfloat16.
        """
        return self.read([fqn], dtype=dtype, kind="numpy")[fqn]

    def slice(self, fqn: str, index: Any, *, dtype: str | None = None, kind: str | None = None) -> Any:
        """Return a box of a tensor. It reads only the 64 KiB blocks that overlap the box.

        Args:
            fqn: name of the tensor.
            index: a slice or integer, or a sequence of them, as in numpy's basic slicing.
            dtype: dtype to convert to; by default that of the checkpoint.
            kind: ``torch`` or ``numpy``; by default the first that is installed.

        Raises:
            KeyError: the checkpoint has no such tensor.
            IndexError: the index is out of range, or has too many dimensions.
            ValueError: a slice has a step other than 1.
            TypeError: the index selects more than a box, or kind lacks the dtype.
        """
        handle = self._handle(fqn)
        box, shape = box_of(fqn, handle.shape, tuple(index) if isinstance(index, list) else index)
        out, part = self._part(handle, box, shape, dtype, kind)
        fetch(self._wire, self.ref, [part])
        return out

    def read(self, fqns: Iterable[str] | None = None, *, dtype: str | None = None, kind: str | None = None) -> dict[str, Any]:
        """Return several tensors, by name, in as few requests as their size permits.

        Args:
            fqns: names of the tensors; by default all.
            dtype: dtype to convert to; by default that of the checkpoint.
            kind: ``torch`` or ``numpy``; by default the first that is installed.
        """
        out: dict[str, Any] = {}
        parts: list[Part] = []
        for fqn in self.tensors if fqns is None else fqns:
            handle = self._handle(fqn)
            out[fqn], part = self._part(handle, whole(handle.shape), handle.shape, dtype, kind)
            parts.append(part)
        fetch(self._wire, self.ref, parts)
        return out

    def _part(self, handle: Tensor, box: Box, shape: Sequence[int], dtype: str | None, kind: str | None) -> tuple[Any, BoxPart]:
        if kind not in (None, "torch", "numpy"):
            raise ValueError(f"kind {kind!r}: want 'torch' or 'numpy'")
        to = handle.dtype if dtype is None else str(dtype).removeprefix("torch.")
        if to not in _arrays.SIZES:
            raise ValueError(f"tensor {handle.fqn!r}: there is no dtype {dtype!r}: want one of {', '.join(_arrays.SIZES)}")
        out, memory = _arrays.empty(kind or _arrays.kind(), handle.fqn, to, shape)
        return out, BoxPart(handle.fqn, to, handle.shape, box, _arrays.SIZES[to], memory)

    def raw(self, key: str, rank: int | None = None) -> bytes:
        """Return the saved bytes of a value.

        Args:
            key: name of the value.
            rank: the rank whose value to read, if ranks saved their own.
        """
        return self._values([self._value_part(key, rank)])[0]

    def value(self, key: str, rank: int | None = None) -> Any:
        """Return a decoded value. It needs PyTorch.

        Args:
            key: name of the value.
            rank: the rank whose value to read, if ranks saved their own.

        Raises:
            NotAllowed: the value has a class that :func:`load` does not allow by default.
        """
        return self._decode(key, self.raw(key, rank))

    def state_dict(self, rank: int | None = None) -> dict[str, Any]:
        """Return all tensors and values, nested as in the saved state dict. It needs PyTorch.

        PyTorch's planner flattens the state dicts of ``dcp.save``, by URL or with
        ckptstore.dcp, and of PyTorch's own files. In these checkpoints all keys are strings,
        except for the keys of an optimizer's state, which are as its groups list them. The
        save warns of keys that look like numbers; for PyTorch's own files this method warns.

        An empty container in a list is None, because a save stores nothing of it.

        Args:
            rank: the rank whose values to take, if ranks saved their own. Values that
                this rank did not save are left out.

        Raises:
            Error: ranks saved their own values, and rank is None.
        """
        own = [fqn for fqn, v in self.objects.items() if v.ranks]
        if own and rank is None:
            ranks = sorted({r for fqn in own for r in self.objects[fqn].ranks})
            raise Error(f"{self.ref}: each of the ranks {ranks} saved {own[0]!r} for itself ({len(own)} such values): give the rank")
        keys = [fqn for fqn, v in self.objects.items() if not v.ranks or rank in v.ranks]
        data = self._values([self._value_part(fqn, rank if self.objects[fqn].ranks else None) for fqn in keys])
        leaves = {self.tensors[fqn].path: value for fqn, value in self.read(kind="torch").items()}
        leaves |= {self.objects[fqn].path: self._decode(fqn, raw) for fqn, raw in zip(keys, data)}
        if not self.run:
            by_kind = ([one.path for one in kind.values() if len(one.path) > 1] for kind in (self.tensors, self.objects))
            _keys.warn(_keys.texts(*by_kind))
        nested: dict[str, Any] = _keys.optimizers(nest(leaves))
        return nested

    def _decode(self, key: str, data: bytes) -> Any:
        try:
            from . import _values
        except ImportError as error:
            raise ImportError(f"value {key!r} is kept in PyTorch's format, and PyTorch is not installed: raw({key!r}) gives it as it is") from error
        return _values.decode(key, data)

    def _handle(self, fqn: str) -> Tensor:
        if fqn in self.tensors:
            return self.tensors[fqn]
        if fqn in self.objects:
            raise KeyError(f"{fqn!r} is a value of {self.ref}, not a tensor: use value or raw")
        raise KeyError(f"{self.ref} has no tensor {fqn!r}{self._near(fqn)}")

    def _value_part(self, key: str, rank: int | None) -> ValuePart:
        if key not in self.objects:
            if key in self.tensors:
                raise KeyError(f"{key!r} is a tensor of {self.ref}, not a value: use tensor, numpy or slice")
            raise KeyError(f"{self.ref} has no value {key!r}{self._near(key)}")
        of = self.objects[key]
        if of.ranks and rank not in of.ranks:
            raise KeyError(f"{self.ref}: value {key!r} was saved by each of the ranks {list(of.ranks)} for itself: give one of them, not {rank}")
        return ValuePart(key, rank if of.ranks else None, of.nbytes)

    def _near(self, key: str) -> str:
        import difflib

        near = difflib.get_close_matches(key, self.keys(), 3)
        return f": did you mean {', '.join(map(repr, near))}?" if near else ": keys() lists what there is"

    def _values(self, parts: list[ValuePart]) -> list[bytes]:
        fetch(self._wire, self.ref, parts)
        return [part.data for part in parts]

    def _wire(self) -> Wire:
        if self._closed:
            raise Error(f"{self.ref} is closed: open it again")
        return services(self._store)

    def close(self) -> None:
        """Close the checkpoint. Tensors and values that were read stay valid."""
        self._closed = True

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


_SCHEME = "ckptstore://"


def reference(ref: str | os.PathLike[str]) -> str:
    """Return a reference in the form of requests: an absolute path, or RUN@NAME for a URL.

    A reference is a path if it begins with / or ./ or ../, if it is an os.PathLike, or if
    it contains a / and leads to a checkpoint.
    """
    text = os.fspath(ref)
    if isinstance(ref, str) and text.startswith(_SCHEME):
        run, _, name = text[len(_SCHEME) :].strip("/").partition("/")
        return f"{run}@{name.replace('/', '~')}" if name else run
    if not isinstance(ref, str) or text in (".", "..") or text.startswith(("/", "./", "../")):
        return os.path.abspath(text)
    if "/" in text and _checkpoint_at(text):
        return os.path.abspath(text)
    return text


def _checkpoint_at(path: str) -> bool:
    if not os.path.isdir(path):
        return os.path.exists(path)
    return any(name == ".metadata" or name.endswith(".safetensors") for name in os.listdir(path))


def open(ref: str | os.PathLike[str], store: str | os.PathLike[str] | None = None) -> Checkpoint:
    """Open a checkpoint for reading. It reads only the layout of the checkpoint.

    Args:
        ref: RUN (its newest checkpoint), RUN@NAME, RUN@latest, an ID, the path of a
            PyTorch DCP directory, a Hugging Face directory or a safetensors file, or the
            URL ``ckptstore://RUN[/PART][/NAME]``.
        store: directory or nats:// URL of the store; by default the trainer's store, or
            $CKPTSTORE_STORE without a trainer.

    Raises:
        Refused: the checkpoint cannot be opened. Status 404 means that it does not exist;
            the text suggests similar names.
        NoStore: no store is known.
    """
    where = None if store is None else os.fspath(store)
    return Checkpoint(services(where).call("store/describe", ref=reference(ref)), where)
