"""Schedules that split the backward into input gradient ``I`` and weight gradient ``W``: ZB-H1 and DualPipeV.

Others (torch's interleaved zero bubble, ZBV) come in through ``Schedule.load``.
"""

from __future__ import annotations

from collections import deque

from torchmoe.errors import ConfigError
from torchmoe.pipeline.action import Action, Op, Schedule
from torchmoe.pipeline.schedules.pipeline import check_counts

__all__ = ["dualpipev", "zb_h1"]


def zb_h1(num_ranks: int, num_microbatches: int) -> Schedule:
    """1F1B with every weight gradient ``r`` micro-batches late on rank r (Qi et al., ZB-H1).

    Bubble (p-1)(F + I - W), a third of 1F1B's for F = I = W; at most p live micro-batches on every rank.
    """
    check_counts(num_ranks=num_ranks, num_microbatches=num_microbatches)
    lists = {}
    for r in range(num_ranks):
        warm = min(num_ranks - r - 1, num_microbatches)
        acts = [Action(r, Op.FORWARD, m) for m in range(warm)]
        for i in range(num_microbatches):
            if warm + i < num_microbatches:
                acts.append(Action(r, Op.FORWARD, warm + i))
            acts.append(Action(r, Op.BACKWARD_INPUT, i))
            if i >= r:
                acts.append(Action(r, Op.BACKWARD_WEIGHT, i - r))
        acts += [Action(r, Op.BACKWARD_WEIGHT, m) for m in range(max(0, num_microbatches - r), num_microbatches)]
        lists[str(r)] = tuple(acts)
    return Schedule(lists, num_microbatches)


def dualpipev(num_ranks: int, num_microbatches: int, *, overlap: bool = True) -> Schedule:
    """DualPipeV (DeepSeek-AI): two stages per rank in a V, rank r holds r and 2p-1-r; forwards and backwards run in pairs.

    Bubble (p-1)(F&B + B - 3W) with stage times F, B = I + W, and F&B of an overlapped pair; at most 2p+1 live stages.

    Args:
        num_ranks: p. The paper's PP is 2p.
        num_microbatches: at least 2p.
        overlap: write pairs as ``OVERLAP_F_B``; False writes them one after the other.

    Raises:
        ConfigError: fewer than 2p micro-batches.
    """
    check_counts(num_ranks=num_ranks)
    if num_microbatches < 2 * num_ranks:
        raise ConfigError(
            f"num_microbatches={num_microbatches} with {num_ranks} ranks: DualPipeV needs two per rank to fill its V; "
            f"use {2 * num_ranks} or more"
        )
    lists = {str(r): tuple(_DualPipeV(r, num_ranks, overlap).build(num_microbatches)) for r in range(num_ranks)}
    return Schedule(lists, num_microbatches)


class _DualPipeV:
    """One rank's list. Chunk 0 goes down the V, chunk 1 comes back up; counters say which micro-batch is next."""

    def __init__(self, rank: int, num_ranks: int, overlap: bool) -> None:
        self.rank, self.p, self.overlap = rank, num_ranks, overlap
        self.stages = (rank, 2 * num_ranks - 1 - rank)
        self.next_f, self.next_b = [0, 0], [0, 0]
        self.late: deque[Action] = deque()  # weight gradients to come
        self.out: list[Action] = []

    def _f(self, chunk: int) -> Action:
        self.next_f[chunk] += 1
        return Action(self.stages[chunk], Op.FORWARD, self.next_f[chunk] - 1)

    def _b(self, chunk: int) -> Action:
        self.next_b[chunk] += 1
        return Action(self.stages[chunk], Op.BACKWARD, self.next_b[chunk] - 1)

    def _input(self, chunk: int) -> None:
        a = self._b(chunk)
        self.out.append(a._replace(op=Op.BACKWARD_INPUT))
        self.late.append(a._replace(op=Op.BACKWARD_WEIGHT))

    def _weight(self) -> None:
        self.out.append(self.late.popleft())

    def _pair(self, f_chunk: int, b_chunk: int) -> None:
        pair = (self._f(f_chunk), self._b(b_chunk))
        if self.overlap:
            self.out.append(Action(pair[0].stage, Op.OVERLAP_F_B, sub=pair))
        else:
            self.out += pair

    def build(self, n: int) -> list[Action]:
        behind = self.p - self.rank - 1  # ranks between us and the bottom of the V
        for _ in range(2 * behind):
            self.out.append(self._f(0))
        for _ in range(self.rank + 1):
            self.out += [self._f(0), self._f(1)]
        for _ in range(behind):  # first backwards, with the weight gradient at once: the forward behind it is not there yet
            self._input(1)
            self._weight()
            self.out.append(self._f(1))
        for i in range(n - 2 * self.p + self.rank + 1):  # steady state
            if i == 0 and behind == 0:  # at the bottom both chunks are ours: apart, the gradient leaves earlier
                self.out += [self._f(0), self._b(1)]
            else:
                self._pair(0, 1)
            self._pair(1, 0)
        for _ in range(behind):
            self.out.append(self._b(1))
            self._pair(1, 0)
        split = False
        for i in range(self.rank + 1):  # the second half of these leave their weight gradients for the bubbles
            for chunk in (1, 0):
                split = split or self._half(i, chunk)
                if split:
                    self._input(chunk)
                else:
                    self.out.append(self._b(chunk))
        for _ in range(behind):
            self._weight()
            self._input(0)
        for _ in range(self.rank + 1):
            self._weight()
        return self.out

    def _half(self, i: int, chunk: int) -> bool:
        """Odd ranks switch before chunk 1, even ranks before chunk 0 of the middle pair."""
        return i == (self.rank + 1) // 2 and chunk == self.rank % 2
