"""Layouts compared by simulation: the same layers, work and bytes, colocated or disaggregated, on any number of ranks.

The currency is a unit: one rank's micro-batch of one layer. A step has ``ranks * rounds`` units per layer. A colocated rank
computes its own; an A group of M ranks shares the units of a micro-batch, and so do the N ranks of its F group.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields, replace
from typing import Any

from torchmoe.errors import ConfigError
from torchmoe.pipeline.action import Schedule
from torchmoe.pipeline.costs import Costs
from torchmoe.pipeline.lower import lower
from torchmoe.pipeline.network import Host, Links
from torchmoe.pipeline.schedules.afpipe import AFPipeSchedule
from torchmoe.pipeline.schedules.colocated import ColocatedWiring, colocated
from torchmoe.pipeline.schedules.pipeline import check_counts
from torchmoe.pipeline.simulate import Simulation, simulate
from torchmoe.pipeline.verify import verify
from torchmoe.pipeline.wiring import DisaggregatedWiring, Wiring
from torchmoe.placement import Placement, Residual

__all__ = ["Scheme", "UnitCosts", "Work", "af_scheme", "best", "colocated_scheme", "comparison"]


@dataclass(frozen=True, kw_only=True)
class UnitCosts:
    """What one unit costs.

    Args:
        attention, experts: seconds of the forward on one rank.
        all_to_all: bytes that a rank sends in one all-to-all.
        hand_over: bytes that a rank sends to the next pipeline stage, one row per token.
        backward: backward seconds relative to the forward's, half of it input and half weight gradients.
        attention_bytes, experts_bytes: activations of a live unit.
    """

    attention: float
    experts: float
    all_to_all: float
    hand_over: float = 0.0
    backward: float = 2.0
    attention_bytes: float = 0.0
    experts_bytes: float = 0.0

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if not isinstance(value, int | float) or not (0 <= value < math.inf):
                raise ConfigError(f"{f.name}={value!r} must be a number, 0 or more and finite")


@dataclass(frozen=True, kw_only=True)
class Work:
    """A step: layers, micro-batches of every rank (``rounds``), on so many ranks, at these costs and links."""

    costs: UnitCosts
    ranks: int
    layers: int
    rounds: int
    links: Links = field(default_factory=Links)

    def __post_init__(self) -> None:
        for name in ("ranks", "layers", "rounds"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)!r} must be an integer, at least 1")
        if self.ranks < 2:
            raise ConfigError(f"ranks={self.ranks}: an exchange needs at least 2 ranks")

    @classmethod
    def from_json(cls, text: str, **overrides: Any) -> Work:
        """Read e.g. ``{"ranks": 8, "layers": 8, "rounds": 4, "costs": {"attention": 0.02, ...}, "links": {"bandwidth": 5e10}}``.

        Raises:
            ConfigError: not JSON, a name that is unknown or missing, a value that makes no sense.
        """
        try:
            data = json.loads(text) | {k: v for k, v in overrides.items() if v is not None}
            costs, links = UnitCosts(**data.pop("costs")), Links(**data.pop("links", {}))
            return cls(costs=costs, links=links, **data)
        except (TypeError, KeyError, AttributeError, json.JSONDecodeError) as e:
            raise ConfigError(
                f"stage costs: {e}; give ranks, layers, rounds, costs {{attention, experts, all_to_all, ...}} and links "
                "{bandwidth, latency, ...} as JSON"
            ) from None


@dataclass(frozen=True)
class Scheme:
    """One layout with its lowered schedule and costs.

    Args:
        name: as in the table.
        family: kind of layout.
        schedule, wiring, costs: what is simulated.
        placement, residual: of A/F layouts, else None.
        units: units that one live unit of the schedule stands for on a rank, by group.
    """

    name: str
    family: str
    schedule: Schedule
    wiring: Wiring
    costs: Costs
    placement: Placement | None = None
    residual: Residual | None = None
    units: float = 1.0

    def simulate(self, links: Links, *, host: Host | None = None, record: bool = False) -> Simulation:
        return simulate(self.schedule, self.costs, self.wiring, links=links, host=host, issue="ahead", record=record)

    def dry(self) -> Scheme:
        """The same actions with computations of no time and messages of a thousandth: what remains is the host's work."""
        small = {kind: n / 1000 for kind, n in self.costs.message.items()}
        return replace(self, costs=replace(self.costs, forward=0.0, input_grad=0.0, weight_grad=0.0, message=small))

    def live(self) -> float:
        """Most live units on any rank, each the half (attention or experts) of one layer on one rank's micro-batch."""
        report = verify(self.schedule, self.wiring)
        return max(n * self.units / (self.wiring.size(g) if self.placement else 1) for g, n in report.peak_live.items())


def _stage_costs(work: Work, message: dict[str, float], attention: float, experts: float, parts: int = 1) -> Costs:
    """Costs per micro-batch that is so many units on an attention and on an expert rank. The head is free in every scheme."""
    head, c = 2 * work.layers, work.costs

    def forward(stage: int) -> float:
        return 0.0 if stage == head else c.experts * experts if stage % 2 else c.attention * attention

    def half_backward(stage: int) -> float:
        return forward(stage) * c.backward / 2

    def activation(stage: int) -> float:
        return 0.0 if stage == head else c.experts_bytes * experts if stage % 2 else c.attention_bytes * attention

    return Costs(
        forward=forward, input_grad=half_backward, weight_grad=half_backward, message=message, parts=parts, activation=activation
    )


def colocated_scheme(
    work: Work,
    *,
    groups: int = 1,
    chunks: int = 1,
    parts: int = 1,
    overlap: bool = False,
    split_weights: bool = False,
    cut: int = 1,
) -> Scheme:
    """Expert parallelism over ``ranks / groups`` in ``groups`` pipeline stages; see :mod:`.schedules.colocated`.

    ``cut`` makes each micro-batch as many smaller ones; ``parts`` cuts the all-to-alls alone.

    Raises:
        ConfigError: groups that do not divide the ranks, or layers that do not divide into the chunks.
    """
    if work.ranks % groups or work.ranks == groups:
        raise ConfigError(f"groups={groups} does not leave every stage {work.ranks} / {groups} ranks, at least 2; use a divisor")
    check_counts(cut=cut)
    ep = work.ranks // groups
    wiring = ColocatedWiring(num_layers=work.layers, ep_size=ep, num_groups=groups, num_chunks=chunks, a2a_chunks=parts)
    message = dict.fromkeys(("dispatch", "combine", "d_combine", "d_dispatch"), work.costs.all_to_all * ep / cut)
    message |= dict.fromkeys(("act", "d_act"), work.costs.hand_over * ep / cut)
    schedule = colocated(wiring, work.rounds * groups * cut, overlap=overlap, split_weights=split_weights)
    name = f"EP{ep}" + (f" x PP{groups} interleaved 1F1B" if groups > 1 else "")
    form = "DualPipe-like" if overlap else f"{parts} chunks" if parts > 1 else "blocking"
    family = "DualPipe-like" if overlap else "chunked" if parts > 1 else "blocking"
    name += f", {form}" + (", weights apart" if split_weights else "") + (f", cut in {cut}" if cut > 1 else "")
    return Scheme(name, family, schedule, wiring, _stage_costs(work, message, 1 / cut, 1 / cut, parts), units=1 / cut)


def af_scheme(
    work: Work,
    *,
    p: int,
    attention: int,
    cycle: int | None = None,
    weights_held: int = 0,
    fixed_sizes: bool = True,
    cut: int = 1,
    look_ahead: int = 1,
) -> Scheme:
    """AF-Pipe with p groups per role, ``attention`` ranks in each A group, the rest of ``ranks / p`` in its F group.

    A micro-batch has half as many units as the two groups have ranks, so that an even split gives each rank one (or fewer,
    where that does not divide the step). ``cut`` makes each as many smaller ones: more, shorter transfers to hide, a shorter
    warm-up, and fewer live units.

    Raises:
        ConfigError: groups that do not divide the ranks, or leave a group empty.
    """
    both = work.ranks // p
    check_counts(cut=cut)
    if work.ranks % p or not 0 < attention < both:
        raise ConfigError(f"p={p} attention={attention}: {work.ranks} ranks need p to divide them and 0 < attention < {both}")
    units = max(n for n in range(1, max(1, both // 2) + 1) if work.ranks * work.rounds % n == 0)
    experts = both - attention
    placement = Placement(attention=[attention] * p, ffn=[experts] * p, num_layers=work.layers, num_experts=experts)
    residual: Residual = "local" if p == 1 else "ride"
    part = units / cut
    order = AFPipeSchedule(
        placement,
        work.ranks * work.rounds // units * cut,
        cycle=cycle,
        weights_held=weights_held,
        seconds=(part / attention * work.costs.attention, part / experts * work.costs.experts),
        transfer=part * work.costs.all_to_all / min(attention, experts) / work.links.bandwidth,
    )
    schedule = lower(order, placement, residual=residual, fixed_sizes=fixed_sizes, look_ahead=look_ahead)
    wiring = DisaggregatedWiring(placement, residual=residual, fixed_sizes=fixed_sizes)
    message = dict.fromkeys(("dispatch", "combine", "d_combine", "d_dispatch"), part * work.costs.all_to_all)
    costs = _stage_costs(work, message, part / attention, part / experts)
    name = f"AF-Pipe p={p}, {attention}+{experts}, cycle {cycle or 4 * p}"
    name += (
        (f", cut in {cut}" if cut > 1 else "")
        + (f", {weights_held} weights held" if weights_held else "")
        + ("" if fixed_sizes else ", counts")
    )
    return Scheme(name, "AF-Pipe", schedule, wiring, costs, placement, residual, part)


def best(schemes: Iterable[Scheme], links: Links, host: Callable[[Scheme], Host | None] = lambda s: None) -> Scheme:
    """The one with the shortest simulated step; ``host`` gives what each one's messages cost the issuing machine."""
    return min(schemes, key=lambda s: s.simulate(links, host=host(s)).makespan)


def comparison(work: Work) -> list[Scheme]:
    """Baselines and AF-Pipe, each tuned by simulation: number of parts, A:F split, cycle. The first one is the reference."""
    out = []
    if work.ranks % 2 == 0 and work.ranks >= 4:
        v = max(d for d in range(1, 9) if work.layers % (2 * d) == 0) if work.layers % 2 == 0 else 0
        if v:
            out.append(colocated_scheme(work, groups=2, chunks=v))
    out.append(colocated_scheme(work))
    out.append(best((colocated_scheme(work, parts=k) for k in (2, 4, 8)), work.links))
    out.append(best((colocated_scheme(work, overlap=True, split_weights=w) for w in (False, True)), work.links))
    for p in (1, 2, 4):
        both = work.ranks // p
        if work.ranks % p or both < 2 or p > work.layers:
            continue
        c = work.costs
        balanced = round(both * c.attention / (c.attention + c.experts)) if c.attention + c.experts else both // 2
        splits = sorted({max(1, min(both - 1, m)) for m in (both // 2, balanced - 1, balanced, balanced + 1)})
        tuned = [af_scheme(work, p=p, attention=m, cycle=g) for m in splits for g in (2 * p, 4 * p)]
        out.append(best(tuned, work.links))
    return out
