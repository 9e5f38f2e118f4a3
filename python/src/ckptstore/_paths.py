"""Where a leaf was in its state dict: keys and indexes, as they are and as they are sent."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterable
from typing import Any, Union


@dataclasses.dataclass(frozen=True)
class Literal:
    """A key that is no string: a number, True, False, None, or a tuple of such.

    Attributes:
        text: as Python writes it.
    """

    text: str

    def __repr__(self) -> str:
        return self.text

    @property
    def key(self) -> Any:
        """The key. Raises ValueError for a text that is none."""
        try:
            return ast.literal_eval(self.text)
        except (SyntaxError, ValueError) as error:
            raise ValueError(f"{self.text!r} is no key that Python writes so") from error


Path = tuple[Union[str, int, Literal], ...]
"""Keys that are strings, others as Literal, and the indexes of lists as int."""


def step(key: Any) -> str | Literal:
    """A key of a mapping as a part of a path. One that nothing stands for becomes its text."""
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
    """Whether two keys are equal and of the same types."""
    if type(a) is not type(b) or a != b:
        return False
    return not isinstance(a, tuple) or all(map(_same, a, b))


def sent(path: Path) -> list[Any]:
    """A path as it is sent."""
    return [{"literal": part.text} if isinstance(part, Literal) else part for part in path]


def received(parts: Iterable[Any]) -> Path:
    """A path that was sent."""
    return tuple(Literal(part["literal"]) if isinstance(part, dict) else part for part in parts)


def strings(parts: Iterable[Any]) -> tuple[str | int, ...]:
    """A path that was sent, as PyTorch's planner has it: all keys are strings."""
    return tuple(part.text if isinstance(part, Literal) else part for part in received(parts))
