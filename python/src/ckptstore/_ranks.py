"""Finds the ranks that take part in a save or load."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed

from ._session import Session
from .errors import Error


def participants(what: str, session: Session, ranks: Sequence[int] | None, group: Any) -> list[int] | None:
    """Return the ranks that take part in a save or load, ascending, or None for all.

    Raises:
        ValueError: this rank is not one of them, or they are not distinct valid ranks.
        Error: PyTorch's process group has another size than the trainer's.
    """
    who, dist = session.context, torch.distributed
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() != who.world_size:
        raise Error(f"{what}: PyTorch has a process group of {dist.get_world_size()} ranks, and the trainer one of {who.world_size}: start as many with `trainer run --nproc {dist.get_world_size()}`")
    if group is not None:
        if ranks is not None:
            raise ValueError(f"{what}: ranks and group both select the ranks that take part: pass one")
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            raise ValueError(f"{what}: rank {who.rank} is not in the group: only its members {what}")
        ranks = dist.get_process_group_ranks(group)
    if ranks is None:
        return None
    ranks = sorted(ranks)
    if len(set(ranks)) != len(ranks) or not ranks or ranks[0] < 0 or ranks[-1] >= who.world_size:
        raise ValueError(f"{what}: ranks {ranks} are not distinct ranks of a world of {who.world_size}")
    if who.rank not in ranks:
        raise ValueError(f"{what}: rank {who.rank} {what}s without being one of the ranks {ranks} that take part")
    return ranks
