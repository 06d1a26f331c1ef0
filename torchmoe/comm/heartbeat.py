"""Who is alive: a counter per rank in the store, so that an error names the rank that died and not the ones it took along.

When a rank fails, its neighbours see closed connections, their neighbours see theirs, and every log blames somebody else. With a
heartbeat each rank counts up a key of its own; whoever runs into an error looks which counters stand still, and which ranks
have written down why they gave up, in the order in which they did.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

__all__ = ["Finding", "Heartbeat", "Reason"]


class Reason(NamedTuple):
    """Why a rank gave up, in its own words."""

    rank: int
    text: str


class Finding(NamedTuple):
    """What a rank found out about the others after an error."""

    dead: tuple[int, ...] = ()
    """No heartbeat, and no reason given."""
    first: Reason | None = None
    """Who gave up first with a reason."""
    silent_store: str = ""
    """Not empty: the store itself does not answer, so nothing is known of the ranks."""


class Heartbeat:
    """This rank's counter, and what the others' say.

    Args:
        store: a ``torch.distributed`` store, used by this object alone (``clone()`` one that others use too: a blocked
            operation blocks the whole object).
        rank, world_size: this rank and how many there are.
        interval: seconds between two beats.
    """

    def __init__(self, store: Any, rank: int, world_size: int, *, interval: float = 0.25) -> None:
        self.rank, self.world_size, self.interval = rank, world_size, interval
        self._store = store
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._count = 0
        self._beat()
        self._thread = threading.Thread(target=self._run, name="torchmoe heartbeat", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop counting and say that this rank has ended in good order."""
        self._stop.set()
        self._thread.join(2 * self.interval)
        with contextlib.suppress(Exception), self._lock:
            self._store.set(self._key("ended", self.rank), "1")

    def report(self, text: str) -> None:
        """Write down why this rank gives up; only the first reason counts."""
        try:
            with self._lock:
                if not self._store.check([self._key("reason", self.rank)]):
                    order = self._store.add("torchmoe/failures", 1)
                    self._store.set(self._key("reason", self.rank), f"{order}\n{text}")
        except Exception:  # the store itself is gone: nobody can be told
            return

    def examine(self) -> Finding:
        """Which ranks are dead and which gave up first. Takes about 2.5 intervals."""
        ranks = [r for r in range(self.world_size) if r != self.rank]
        try:
            first = self._counts(ranks)
            time.sleep(2.5 * self.interval)
            second = self._counts(ranks)
            reasons = self._reasons(ranks)
            dead = tuple(r for r in ranks if first[r] == second[r] and r not in reasons and not self._ended(r))
        except Exception as e:
            return Finding(
                silent_store=f"the store does not answer ({type(e).__name__}): the process that hosts it "
                "(rank 0, or the launcher) is dead"
            )
        if not reasons:
            return Finding(dead)
        _, text, rank = min((order, text, r) for r, (order, text) in reasons.items())
        return Finding(dead, Reason(rank, text))

    def verdict(self) -> str:
        """:meth:`examine` as a sentence; empty if all are alive."""
        found = self.examine()
        parts = [found.silent_store] if found.silent_store else []
        if found.dead:
            parts.append(f"dead or stopped: {_names(found.dead)}, no heartbeat for {2.5 * self.interval:.1f} s")
        if found.first is not None:
            parts.append(f"rank {found.first.rank} gave up first: {found.first.text}")
        return "; ".join(parts)

    # ---- inside
    @staticmethod
    def _key(what: str, rank: int) -> str:
        return f"torchmoe/{what}/{rank}"

    def _beat(self) -> None:
        self._count += 1
        with self._lock:
            self._store.set(self._key("beat", self.rank), str(self._count))

    def _run(self) -> None:
        while not self._stop.wait(self.interval):
            try:
                self._beat()
            except Exception:  # the store's host ended; verdict() will say so
                return

    def _ended(self, rank: int) -> bool:
        with self._lock:
            return bool(self._store.check([self._key("ended", rank)]))

    def _counts(self, ranks: Sequence[int]) -> dict[int, bytes]:
        out = {}
        for r in ranks:
            with self._lock:
                there = self._store.check([self._key("beat", r)])
                out[r] = self._store.get(self._key("beat", r)) if there else b"never"
        return out

    def _reasons(self, ranks: Sequence[int]) -> dict[int, tuple[int, str]]:
        out = {}
        for r in ranks:
            with self._lock:
                if self._store.check([self._key("reason", r)]):
                    order, text = self._store.get(self._key("reason", r)).decode().split("\n", 1)
                    out[r] = int(order), text
        return out


def _names(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
