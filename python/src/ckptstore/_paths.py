"""Paths of leaves in a state dict: keys and indexes, in Python and in requests."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterable
from typing import Any, Union


@dataclasses.dataclass(frozen=True)
class Literal:
    """A key that is not a string: a number, True, False, None, or a tuple of these.

    Attributes:
        text: the key as a Python literal.
    """

    text: str

    def __repr__(self) -> str:
        return self.text

    @property
    def key(self) -> Any:
        """The key. Raises ValueError for a text that is not a literal."""
        try:
            return ast.literal_eval(self.text)
        except (SyntaxError, ValueError) as error:
            raise ValueError(f"{self.text!r} is not a Python literal") from error


Path = tuple[Union[str, int, Literal], ...]
"""String keys as str, other keys as Literal, and indexes of lists as int."""


def step(key: Any) -> str | Literal:
    """Return a mapping's key as a part of a path. A key without a literal becomes its text."""
    if isinstance(key, str):
        return key
    text = str(key)
    literal = Literal(text)
    try:
        same = _same(literal.key, key)
    except ValueError:
        return text
    return literal if same else text


def _same(a: Any, b: Any) -> bool:
    """Report whether two keys are equal and of the same types."""
    if type(a) is not type(b) or a != b:
        return False
    return not isinstance(a, tuple) or all(map(_same, a, b))


def sent(path: Path) -> list[Any]:
    """Encode a path for a request."""
    return [{"literal": part.text} if isinstance(part, Literal) else part for part in path]


def received(parts: Iterable[Any]) -> Path:
    """Decode a path of a reply."""
    return tuple(Literal(part["literal"]) if isinstance(part, dict) else part for part in parts)


def strings(parts: Iterable[Any]) -> tuple[str | int, ...]:
    """Decode a path of a reply for PyTorch's planner, in which all keys are strings."""
    return tuple(part.text if isinstance(part, Literal) else part for part in received(parts))
