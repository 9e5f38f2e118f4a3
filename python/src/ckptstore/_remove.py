"""``ckptstore.remove``: deletes a checkpoint by name."""

from __future__ import annotations

import os
import warnings
from typing import Any, Iterable, Mapping

from ._checkpoint import reference
from ._connect import services


def remove(ref: str | os.PathLike[str], store: str | os.PathLike[str] | None = None) -> None:
    """Delete a committed checkpoint from its run, and its files.

    A pin, a tag, a fork or a restore in progress holds the files. The checkpoint leaves its
    run anyway, and a warning names the holder. A later removal or ``ckptstore gc`` deletes
    the files once nothing holds them.

    Args:
        ref: reference with a name, ``RUN@NAME``; not a path.
        store: as for :func:`open`.

    Raises:
        ValueError: ref has no name.
        Refused: the checkpoint cannot be deleted. Status 404 means that it does not exist.
    """
    if "@" not in reference(ref):
        raise ValueError(f"remove {os.fspath(ref)!r}: name the checkpoint, as RUN@NAME: a run alone means its newest checkpoint")
    where = None if store is None else os.fspath(store)
    warn(services(where).call("store/fs/remove", checkpoint=reference(ref)), f"remove {os.fspath(ref)}")


def warn(reply: Mapping[str, Any], what: str) -> None:
    """Warn of checkpoints whose files stay for now."""
    kept: Iterable[Mapping[str, str]] = reply.get("kept", ())
    for one in kept:
        warnings.warn(f"{what}: the files of {one['checkpoint']} stay for now: {one['reason']}", stacklevel=3)
