"""The schemes that the emulated cluster compares: same layers, same work, same bytes, another layout and schedule each.

Calibration (DisagMoE's Figure 6a read as time shares): per layer and for s thousand tokens, in units where the colocated layer
at 4K costs 100 on all ranks, attention 5.637 s + 0.3645 s^2, experts 4.805 s, one all-to-all 6.575 s. Two readings of the
published shares: ``step`` takes them for the whole step (forward and backward, communication about 52 %), ``fwd`` for the
forward alone, with a backward of twice the computation and the same communication (about 42 %). The paper does not say which.
Every length is scaled so that a colocated layer's forward takes as long as at the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

from torchmoe.pipeline.compare import Scheme, UnitCosts, Work, af_scheme, best, colocated_scheme
from torchmoe.pipeline.network import Host, Links

__all__ = ["Calibration", "Scheme", "dry_schemes", "host_of", "schemes", "work_of"]

WORLD, LAYERS, ROUNDS = 8, 8, 4
"""Ranks, MoE layers, and micro-batches of every rank: 32 rank-micro-batches ("units") in all."""
TOP_K = 8
"""Copies of a token in an all-to-all; a hand-over between pipeline stages carries one."""
TOKENS = 48
"""Rows of an attention rank's micro-batch; divides by 2, 3 and 4 expert ranks. Their width makes the bytes."""
CUTS = (1, 2)
"""Parts that a micro-batch may be cut into. Eight ranks on a few cores carry no more messages than that."""

Reading = Literal["step", "fwd"]


@dataclass(frozen=True)
class Calibration:
    """Seconds of one unit (one rank's micro-batch) of one layer, forward, and of one all-to-all of it.

    Args:
        length: tokens in thousands.
        reading: see the module.
        unit: milliseconds that 1 % of a colocated layer's forward takes.
    """

    length: float
    reading: Reading
    unit: float = 1.0

    @property
    def shares(self) -> tuple[float, float, float]:
        """Attention, experts, one all-to-all in percent of a colocated layer, as published."""
        s = self.length
        a, f, c = 5.637 * s + 0.3645 * s * s, 4.805 * s, 6.575 * s
        total = a + f + 2 * c
        return 100 * a / total, 100 * f / total, 100 * c / total

    @property
    def attention(self) -> float:
        return self.shares[0] * self._compute

    @property
    def experts(self) -> float:
        return self.shares[1] * self._compute

    @property
    def all_to_all(self) -> float:
        return self.shares[2] * self.unit / 1e3

    @property
    def _compute(self) -> float:
        # whole step: 3 times the forward's computation against 4 all-to-alls, so the forward's share is 2/3 of the step's
        return self.unit / 1e3 * (2 / 3 if self.reading == "step" else 1.0)


def work_of(cal: Calibration, rate: float, links: Links | None = None) -> Work:
    """The step at one calibration; ``rate`` (bytes per second of a link) turns the seconds of transfers into bytes."""
    size = cal.all_to_all * rate
    costs = UnitCosts(attention=cal.attention, experts=cal.experts, all_to_all=size, hand_over=size / TOP_K)
    return Work(costs=costs, ranks=WORLD, layers=LAYERS, rounds=ROUNDS, links=links or Links(bandwidth=rate))


def dry_schemes(rate: float) -> dict[str, Scheme]:
    """One scheme of each kind of rank, for :func:`.emulated_cluster_ranks.measure_units`."""
    w = work_of(Calibration(4.0, "step"), rate)
    chosen = (af_scheme(w, p=1, attention=4, cycle=4), af_scheme(w, p=2, attention=2, cycle=8), colocated_scheme(w))
    return {_kind(s): s for s in chosen}


def host_of(scheme: Scheme, hosts: Mapping[str, Host]) -> Host | None:
    """What the host pays for a scheme."""
    return hosts.get(_kind(scheme))


def _kind(scheme: Scheme) -> str:
    """The A/F exchange does more per unit than plain all-to-alls, and more again where groups hand routing and residual on."""
    if scheme.placement is None:
        return "colocated"
    return "A/F" if len(scheme.placement.attention) == 1 else "A/F, p > 1"


def schemes(cal: Calibration, rate: float, links: Links, hosts: Mapping[str, Host], *, full: bool = False) -> list[Scheme]:
    """All schemes at one calibration, the reference first; those of a family are tuned by simulation.

    Default: interleaved 1F1B, expert parallelism without pipeline, the best chunked and the best DualPipe-like form, then AF-Pipe
    as in the paper (p = 2 even, p = 1 with the best split) and the best AF-Pipe. ``full`` adds weaker baselines, and what each
    of AF-Pipe's options brings alone.
    """
    w, host = work_of(cal, rate, links), partial(host_of, hosts=hosts)
    splits = (WORLD // 2, WORLD // 2 + 1)
    plain = best((af_scheme(w, p=1, attention=m, cycle=4) for m in splits), links, host)
    assert plain.placement is not None
    m = plain.placement.attention[0]
    tuned = [
        af_scheme(w, p=1, attention=m, cycle=cycle, cut=cut, weights_held=held)
        for cut in CUTS
        for cycle in (3, 4, 5)
        for held in (0, 4)
    ]
    out = [
        colocated_scheme(w, groups=2, chunks=4),
        colocated_scheme(w),
        best((colocated_scheme(w, parts=k) for k in (2, 4)), links, host),
        best((colocated_scheme(w, overlap=True, split_weights=s) for s in (False, True)), links, host),
        af_scheme(w, p=2, attention=2, cycle=8),
        plain,
        best(tuned, links, host),
    ]
    if full:
        out += [
            colocated_scheme(w, groups=2, chunks=4, parts=4),
            colocated_scheme(w, parts=8),
            colocated_scheme(w, overlap=True),
            colocated_scheme(w, overlap=True, split_weights=True, cut=2),
            af_scheme(w, p=2, attention=2, cycle=8, cut=2),
            af_scheme(w, p=1, attention=m, cycle=2),
            af_scheme(w, p=1, attention=m, cycle=4, weights_held=4),
            af_scheme(w, p=1, attention=m, cycle=4, cut=2),
            af_scheme(w, p=1, attention=m, cycle=3, cut=2),
            af_scheme(w, p=1, attention=m, cycle=4, fixed_sizes=False),
            af_scheme(w, p=1, attention=WORLD + 1 - m, cycle=4),
        ]
    return list({s.name: s for s in out}.values())
