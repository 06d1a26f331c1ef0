"""The schemes that the emulated cluster compares: same layers, same work, same bytes, another layout and schedule each.

Calibration (DisagMoE's Figure 6a read as time shares): per layer and for s thousand tokens, in units where the colocated layer
at 4K costs 100 on all ranks, attention 5.637 s + 0.3645 s^2, experts 4.805 s, one all-to-all 6.575 s. Two readings of the
published shares: ``step`` takes them for the whole step (forward and backward, communication about 52 %), ``fwd`` for the
forward alone, with a backward of twice the computation and the same communication (about 42 %). The paper does not say which.
Every length is scaled so that a colocated layer's forward takes as long as at the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torchmoe.pipeline.action import Schedule
from torchmoe.pipeline.costs import Costs
from torchmoe.pipeline.lower import lower
from torchmoe.pipeline.network import Links
from torchmoe.pipeline.schedules.afpipe import afpipe
from torchmoe.pipeline.schedules.colocated import ColocatedWiring, colocated
from torchmoe.pipeline.simulate import Simulation, simulate
from torchmoe.pipeline.verify import verify
from torchmoe.pipeline.wiring import DisaggregatedWiring, Wiring
from torchmoe.placement import Placement, Residual

__all__ = ["Calibration", "Scheme", "schemes"]

WORLD, LAYERS, ROUNDS = 8, 8, 4
"""Ranks, MoE layers, and micro-batches of every rank: 32 rank-micro-batches ("units") in all."""
TOP_K = 8
"""Copies of a token in an all-to-all; a hand-over between pipeline stages carries one."""
TOKENS = 48
"""Rows of an attention rank's micro-batch; divides by 2, 3 and 4 expert ranks. Their width makes the bytes."""

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


@dataclass(frozen=True)
class Scheme:
    """One layout with its schedule and costs.

    Args:
        name: as in the table.
        schedule: lowered.
        wiring: groups of the schedule.
        costs: seconds and bytes.
        placement: of A/F schemes, else None.
        residual: of A/F schemes.
        family: the kind of scheme, for speed-ups.
        main: part of every run; the others only of full ones.
    """

    name: str
    schedule: Schedule
    wiring: Wiring
    costs: Costs
    placement: Placement | None = None
    residual: Residual | None = None
    family: str = ""
    main: bool = True

    def simulate(self, links: Links, *, record: bool = False) -> Simulation:
        return simulate(self.schedule, self.costs, self.wiring, links=links, issue="ahead", record=record)

    def live(self) -> int:
        """Most live units on any rank, in units of one layer's half on one rank's micro-batch."""
        report = verify(self.schedule, self.wiring)
        scale = WORLD * ROUNDS / self.schedule.num_microbatches
        return max(round(n * scale / self.wiring.size(g)) for g, n in report.peak_live.items())


def _colocated(
    cal: Calibration,
    rate: float,
    *,
    groups: int = 1,
    chunks: int = 1,
    parts: int = 1,
    overlap: bool = False,
    split: bool = False,
    name: str,
    family: str,
    main: bool = True,
) -> Scheme:
    ep = WORLD // groups
    wiring = ColocatedWiring(num_layers=LAYERS, ep_size=ep, num_groups=groups, num_chunks=chunks, a2a_chunks=parts)
    one = cal.all_to_all * rate * ep  # bytes of one all-to-all of the whole group, without self-copies
    message = dict.fromkeys(("dispatch", "combine", "d_combine", "d_dispatch"), one) | dict.fromkeys(
        ("act", "d_act"), one / TOP_K
    )
    costs = _costs(cal, message, 1.0, 1.0, parts)
    schedule = colocated(wiring, ROUNDS * groups, overlap=overlap, split_weights=split)
    return Scheme(name, schedule, wiring, costs, family=family, main=main)


def _costs(cal: Calibration, message: dict[str, float], attention: float, experts: float, parts: int = 1) -> Costs:
    """Costs per micro-batch with so many units per attention and per expert rank. The head is free in every scheme."""
    head = 2 * LAYERS

    def seconds(stage: int) -> float:
        return 0.0 if stage == head else cal.experts * experts if stage % 2 else cal.attention * attention

    return Costs(forward=seconds, input_grad=seconds, weight_grad=seconds, message=message, parts=parts)


def af(
    cal: Calibration,
    rate: float,
    p: int,
    attention: int,
    cycle: int,
    *,
    weights_held: int = 0,
    fixed: bool = True,
    name: str,
    main: bool = True,
) -> Scheme:
    """AF-Pipe with p groups per role; ``attention`` ranks of each A group, the rest of its share of ranks is the F group."""
    experts = WORLD // p - attention
    placement = Placement(attention=[attention] * p, ffn=[experts] * p, num_layers=LAYERS, num_experts=experts)
    units = 4 // p  # units of one micro-batch; ranks of a group share them
    residual: Residual = "local" if p == 1 else "ride"
    total = units * cal.all_to_all * rate
    message = dict.fromkeys(("dispatch", "combine", "d_combine", "d_dispatch"), total)
    order = afpipe(placement, WORLD * ROUNDS // units, cycle=cycle, weights_held=weights_held)
    schedule = lower(order, placement, residual=residual, fixed_sizes=fixed)
    costs = _costs(cal, message, units / attention, units / experts)
    wiring = DisaggregatedWiring(placement, residual=residual, fixed_sizes=fixed)
    return Scheme(name, schedule, wiring, costs, placement, residual, "AF-Pipe", main)


def schemes(cal: Calibration, rate: float) -> list[Scheme]:
    """All schemes at one calibration.

    Args:
        rate: bytes per second of a link; with it the seconds of a transfer become bytes.
    """
    return [
        _colocated(cal, rate, groups=2, chunks=4, name="EP4 x PP2 interleaved 1F1B, blocking", family="baseline"),
        _colocated(cal, rate, name="EP8 without PP, blocking", family="baseline", main=False),
        _colocated(cal, rate, groups=2, chunks=4, parts=4, name="EP4 x PP2, 4 chunks", family="chunked", main=False),
        _colocated(cal, rate, parts=4, name="EP8, 4 chunks", family="chunked"),
        _colocated(cal, rate, overlap=True, name="EP8 DualPipe-like", family="DualPipe-like", main=False),
        _colocated(cal, rate, overlap=True, split=True, name="EP8 DualPipe-like, weights apart", family="DualPipe-like"),
        af(cal, rate, 2, 2, 8, name="AF-Pipe p=2, 2+2, cycle 8"),
        af(cal, rate, 1, 4, 4, name="AF-Pipe p=1, 4+4, cycle 4"),
        af(cal, rate, 1, 5, 4, name="AF-Pipe p=1, 5+3, cycle 4"),
        af(cal, rate, 1, 4, 4, fixed=False, name="AF-Pipe p=1, 4+4, exact sizes", main=False),
    ]
