"""Plain pipelines on p ranks (groups ``0`` .. ``p-1``): GPipe, 1F1B, interleaved 1F1B. Compute-only lists.

Formulas (m micro-batches, v stages per rank, F and B times of one rank's whole share): the bubble is (p-1)(F+B) for GPipe and
1F1B and (p-1)(F+B)/v for the interleaved form; peak live stages are m, p-r, and 2(p-r-1) + (v-1)p + 1 on rank r.
"""

from __future__ import annotations

from itertools import accumulate

from torchmoe.errors import ConfigError
from torchmoe.pipeline.action import Action, Op, Schedule
from torchmoe.pipeline.schedules.afpipe import cycles

__all__ = ["check_counts", "gpipe", "interleaved_1f1b", "interleaved_order", "one_f_one_b"]


def check_counts(**counts: int) -> None:
    """Refuse numbers below 1."""
    for name, value in counts.items():
        if value < 1:
            raise ConfigError(f"{name}={value} must be at least 1")


def gpipe(num_ranks: int, num_microbatches: int) -> Schedule:
    """All forwards, then all backwards."""
    check_counts(num_ranks=num_ranks, num_microbatches=num_microbatches)
    ms = range(num_microbatches)
    lists = {
        str(r): tuple([Action(r, Op.FORWARD, m) for m in ms] + [Action(r, Op.BACKWARD, m) for m in ms]) for r in range(num_ranks)
    }
    return Schedule(lists, num_microbatches)


def one_f_one_b(num_ranks: int, num_microbatches: int) -> Schedule:
    """p-r-1 forwards of warm-up on rank r, then one forward and one backward in turn."""
    check_counts(num_ranks=num_ranks, num_microbatches=num_microbatches)
    lists = {}
    for r in range(num_ranks):
        warm = min(num_ranks - r - 1, num_microbatches)
        acts = [Action(r, Op.FORWARD, m) for m in range(warm)]
        for i in range(num_microbatches - warm):
            acts += [Action(r, Op.FORWARD, warm + i), Action(r, Op.BACKWARD, i)]
        acts += [Action(r, Op.BACKWARD, m) for m in range(num_microbatches - warm, num_microbatches)]
        lists[str(r)] = tuple(acts)
    return Schedule(lists, num_microbatches)


def interleaved_order(rank: int, num_ranks: int, num_chunks: int, num_microbatches: int, cycle: int) -> list[tuple[Op, int, int]]:
    """(F or B, chunk, micro-batch) of one rank: Megatron's interleaved order with cycles of ``cycle`` micro-batches or more."""
    lengths = cycles(num_microbatches, cycle)
    starts = [0, *accumulate(lengths)]
    forward = [(c, m) for a, n in zip(starts, lengths, strict=False) for c in range(num_chunks) for m in range(a, a + n)]
    backward = [(num_chunks - 1 - c, m) for c, m in forward]
    warm = min(2 * (num_ranks - rank - 1) + (num_chunks - 1) * max(lengths), len(forward))
    order: list[tuple[Op, int, int]] = [(Op.FORWARD, *u) for u in forward[:warm]]
    for f, b in zip(forward[warm:], backward, strict=False):
        order += [(Op.FORWARD, *f), (Op.BACKWARD, *b)]
    return order + [(Op.BACKWARD, *u) for u in backward[len(forward) - warm :]]


def interleaved_1f1b(num_ranks: int, num_microbatches: int, *, num_chunks: int = 2) -> Schedule:
    """``num_chunks`` stages per rank, stage = chunk * p + rank; the bubble shrinks by their number, messages grow by it.

    Micro-batches need not be a multiple of p: cycles are made equal up to one.
    """
    check_counts(num_ranks=num_ranks, num_microbatches=num_microbatches, num_chunks=num_chunks)
    lists = {}
    for r in range(num_ranks):
        order = interleaved_order(r, num_ranks, num_chunks, num_microbatches, num_ranks)
        lists[str(r)] = tuple(Action(c * num_ranks + r, op, m) for op, c, m in order)
    return Schedule(lists, num_microbatches)
