"""Who died first. A lost connection names a neighbour, which may itself have ended because of somebody else.

Before a rank ends with an error it leaves a note in the job's store: which rank it lost, or that it failed by itself. Its
connections close only after that, so whoever loses it finds the note.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from torchmoe.errors import ExchangeError, PeerLost
from torchmoe.placement import Placement

__all__ = ["naming_the_dead"]

PATIENCE = 4.0  # seconds to wait for the notes of others where only a collective failed
_FIRST, _HERE = "torchmoe/first", "torchmoe/here"


def _store() -> Any:
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def _say(placement: Placement, rank: int) -> str:
    where = placement.where(rank)
    return f"rank {rank} ({where.group}[{where.index}])"


def _first(placement: Placement, me: int, peer: int | None) -> str:
    """What happened first, from the notes; leaves a note itself."""
    store = _store()
    store.set(f"{_HERE}/{me}", "1")
    if peer is not None:
        note = f"{_say(placement, peer)} died or closed its connections"
        return str(store.compare_set(_FIRST, "", note).decode())
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        if store.check([_FIRST]):
            return str(store.get(_FIRST).decode())
        time.sleep(0.05)
    silent = [r for r in range(placement.world_size) if not store.check([f"{_HERE}/{r}"])]
    if not silent:
        return "every rank lost a connection and none was the first to say so"
    return f"{', '.join(_say(placement, r) for r in silent)} died or did not answer"


@contextmanager
def naming_the_dead(placement: Placement, me: int, what: str) -> Iterator[None]:
    """Run a part of the job; an error in communication is raised as one that names the rank that failed first.

    Args:
        placement: the layout.
        me: this rank.
        what: where the job is, for the message.

    Raises:
        PeerLost: another rank failed.
    """
    try:
        yield
    except Exception as e:
        lost = isinstance(e, ExchangeError) or "onnection" in str(e) or isinstance(e, dist.DistError)
        if not lost:
            _note_own(placement, me, e)
            raise
        peer = e.peer if isinstance(e, PeerLost) else None
        try:
            first = _first(placement, me, peer)
        except Exception:  # the store is gone: its host is rank 0, unless a launcher keeps it
            first = f"{_say(placement, 0)} died: it kept the job's store, which does not answer"
        text = " ".join(str(e).split())
        error = PeerLost(f"{what} on {_say(placement, me)}: {first}; this rank was waiting here: {text}")
        error.peer = peer
        raise error from e


def _note_own(placement: Placement, me: int, error: Exception) -> None:
    """This rank failed by itself: say so before its connections close."""
    try:
        store = _store()
        store.set(f"{_HERE}/{me}", "1")
        store.compare_set(_FIRST, "", f"{_say(placement, me)} failed with {type(error).__name__}: {error}")
    except Exception:  # the store's host is gone; the error on its way up is the one that must be raised
        return
