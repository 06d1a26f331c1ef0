"""AF-Pipe (DisagMoE, section 4.2): forward goes A -> F -> next A, gradients come back, both pools stay busy.

A group issues ``cycle`` micro-batches of its first unit, then of its next one, and so on; after a warm-up it alternates one
forward and one backward. A cycle of 2p micro-batches fills the chain ``A0 F0 A1 F1 ...``; 4p also covers the M2N and N2M
transfers between two stages, which are stages of their own in the paper. The orders of forwards and of backwards of a group are
fixed by that (so every edge is first in, first out); how they are merged is chosen among interleaved 1F1B and runs with modelled
times.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from itertools import accumulate

from torchmoe.errors import ConfigError, ScheduleError, check_whole
from torchmoe.pipeline.action import Action, Op, Schedule
from torchmoe.placement import GroupId, Placement

__all__ = ["AFPipeSchedule", "cycles", "default_cycle", "live_units"]

_Unit = tuple[Op, int, int]  # what, unit, micro-batch
_Orders = dict[str, list[_Unit]]
_TRANSFERS = (0.0, 0.5, 1.0)  # candidates are built for these transfer times


def default_cycle(placement: Placement) -> int:
    """4p micro-batches with p the larger number of groups: hides one transfer per stage at the price of more live units."""
    return 4 * max(len(placement.attention), len(placement.ffn))


def cycles(num_microbatches: int, cycle: int) -> tuple[int, ...]:
    """Lengths of the cycles: floor(n / cycle) of them, equal up to one (a short last cycle deadlocks), longest first."""
    count = max(1, num_microbatches // cycle)
    base, more = divmod(num_microbatches, count)
    return tuple(base + (i < more) for i in range(count))


class AFPipeSchedule(Schedule):
    """The compute order of every group (``A0``, ``F0``, ...) for one step; :func:`torchmoe.pipeline.lower.lower` adds messages.

    Args:
        placement: groups and layers; p need not divide L, and the two roles may have different numbers of groups.
        num_microbatches: micro-batches of one step, any number from 1 (cycles are made equal up to one).
        cycle: micro-batches a group issues per unit before its next unit; from 2p, default 4p.
        max_live: at most so many live units (one micro-batch on one unit) on any group; default: what hides the round trip,
            2(2p-r-1) + (v-1)G + 1 on group r of the chain with v = ceil((2L+1) / 2p).
        weights_held: 0 keeps an expert unit's backward whole (``B``). k > 0 splits it into ``I`` and ``W``, and runs each ``W``
            where the group would wait, at the latest when k units hold one.
        seconds: forward time of an attention and of an expert unit, for which the order is chosen; each gradient takes as long.
        transfer: time of one transfer, in the same unit.
        forward_only: forwards only, for validation.

    Raises:
        ConfigError: a cycle below 2p, fewer live units than a cycle needs, a negative number, no micro-batch.
    """

    def __init__(
        self,
        placement: Placement,
        num_microbatches: int,
        *,
        cycle: int | None = None,
        max_live: int | None = None,
        weights_held: int = 0,
        seconds: tuple[float, float] = (1.0, 1.0),
        transfer: float = 0.5,
        forward_only: bool = False,
    ) -> None:
        lists = _lists(placement, num_microbatches, cycle, max_live, weights_held, seconds, transfer, forward_only)
        super().__init__(lists, num_microbatches, forward_only=forward_only)


def _lists(
    placement: Placement,
    num_microbatches: int,
    cycle: int | None,
    max_live: int | None,
    weights_held: int,
    seconds: tuple[float, float],
    transfer: float,
    forward_only: bool,
) -> dict[str, tuple[Action, ...]]:
    p = max(len(placement.attention), len(placement.ffn))
    cycle = default_cycle(placement) if cycle is None else cycle
    check_whole("num_microbatches", num_microbatches, 1, "give every step a micro-batch")
    if not isinstance(cycle, int):
        raise ConfigError(f"cycle={cycle!r} must be a whole number of micro-batches; leave it out for {default_cycle(placement)}")
    if cycle < 2 * p:
        raise ConfigError(
            f"cycle={cycle} with {p} groups per role: below 2p = {2 * p} a backward waits for a forward behind it; "
            f"use {2 * p} or more"
        )
    if weights_held < 0:
        raise ConfigError(f"weights_held={weights_held} counts units and must be 0 or more; use 0 for whole backwards")
    for label, value in (("transfer", transfer), ("seconds[0]", seconds[0]), ("seconds[1]", seconds[1])):
        if not 0 <= value < math.inf:
            raise ConfigError(f"{label}={value} must be 0 or more, and finite")
    lengths = cycles(num_microbatches, cycle)
    groups = {str(g): _Group(g, placement, lengths) for g in placement.groups()}
    if forward_only:
        return {name: tuple(Action(s, Op.FORWARD, m) for s, m in g.forward) for name, g in groups.items()}
    bound = {name: _bound(g, placement, max(lengths), max_live) for name, g in groups.items()}
    head = 2 * placement.num_layers
    pace = _Pace(seconds, transfer, head, one_at_a_time=True)
    # Candidates for the given pace and for transfers that only delay: no greedy run is best for all shapes.
    paces = [*(_Pace(seconds, t * sum(seconds) / 2, head) for t in _TRANSFERS), pace]
    runs = [_Run(groups, bound, x) for x in paces]
    candidates = [run.orders(0) for run in runs]
    if len(placement.attention) == len(placement.ffn) and placement.head == "attention" and max_live is None:
        candidates.append({name: _chain_order(g, p, placement.num_layers, lengths) for name, g in groups.items()})
    if weights_held:
        candidates = [_split(orders, head) for orders in candidates]
        candidates += [run.orders(weights_held) for run in runs]
    best = min(candidates, key=lambda orders: (round(_length(orders, pace), 9), sum(_peaks(orders).values())))
    return {name: tuple(Action(s, op, m) for op, s, m in order) for name, order in best.items()}


class _Group:
    """The fixed forward and backward orders of one group; only their merge is a choice."""

    def __init__(self, group: GroupId, placement: Placement, lengths: Sequence[int]) -> None:
        units = placement.stages(group)
        self.id, self.units, self.longest = group, units, max(lengths)
        # A group with two units behind our last one starts the nearer one's backward after the farther one's whole cycle.
        self.waits_for_cycle = any(sum(s > units[-1] for s in placement.stages(g)) > 1 for g in placement.groups())
        starts = [0, *accumulate(lengths)]
        blocks = [range(a, a + n) for a, n in zip(starts, lengths, strict=False)]
        self.forward = [(s, m) for block in blocks for s in units for m in block]
        head = 2 * placement.num_layers  # its backward is part of its forward: many micro-batches of logits never live at once
        self.backward = [(s, m) for block in blocks for s in reversed(units) if s != head for m in block]

    @property
    def least_live(self) -> int:
        """Forwards before the first backward can be served: every unit but the last for a whole cycle, then one (or all)."""
        return len(self.units) * self.longest if self.waits_for_cycle else (len(self.units) - 1) * self.longest + 1


def _bound(group: _Group, placement: Placement, longest: int, max_live: int | None) -> int:
    """Live units that a group may have. Below its least need there would be no order, so that is refused."""
    if max_live is not None and max_live < group.least_live:
        raise ConfigError(
            f"max_live={max_live}: {group.id} needs {group.least_live} live units for its first backward "
            f"({len(group.units)} units, cycles of {longest}); allow that many, use a shorter cycle or more groups"
        )
    pa, pf, head = len(placement.attention), len(placement.ffn), 2 * placement.num_layers
    if pa == pf:
        r = 2 * group.id.index + (group.id.role == "ffn")
        enough = 2 * (2 * pa - r - 1) + (-(-(head + 1) // (2 * pa)) - 1) * longest + 1
    else:  # the same round trip: two slots per unit between the group's last one and the head
        enough = group.least_live + 2 * (head - group.units[-1])
    return min(max(enough, group.least_live), max_live or enough + group.least_live)


def _chain_order(group: _Group, p: int, num_layers: int, lengths: Sequence[int]) -> list[_Unit]:
    """Interleaved 1F1B of group r of the chain of 2p: warm-up of 2(2p-r-1) + (v-1)G forwards, then pairs, then backwards.

    v is padded to the longest chain and units past the head are left out, so that all groups count alike.
    """
    width, head = 2 * p, 2 * num_layers
    r = 2 * group.id.index + (group.id.role == "ffn")
    v = -(-(head + 1) // width)
    starts = [0, *accumulate(lengths)]
    forward = [(c, m) for a, n in zip(starts, lengths, strict=False) for c in range(v) for m in range(a, a + n)]
    backward = [(v - 1 - c, m) for c, m in forward]
    warm = min(2 * (width - r - 1) + (v - 1) * max(lengths), len(forward))
    order: list[_Unit] = [(Op.FORWARD, c, m) for c, m in forward[:warm]]
    for i in range(len(forward) - warm):
        order += [(Op.FORWARD, *forward[warm + i]), (Op.BACKWARD, *backward[i])]
    order += [(Op.BACKWARD, *u) for u in backward[len(forward) - warm :]]
    units = [(op, c * width + r, m) for op, c, m in order if c * width + r <= head]
    # The head's backward directly after its forward, else many micro-batches of logits would live at once.
    return [x for u in units if u[:2] != (Op.BACKWARD, head) for x in ((u, (Op.BACKWARD, *u[1:])) if u[1] == head else (u,))]


def _split(orders: _Orders, head: int) -> _Orders:
    """Every whole backward of experts as input and weight gradient, one after the other."""
    return {
        name: [
            part
            for op, s, m in order
            for part in (
                ((Op.BACKWARD_INPUT, s, m), (Op.BACKWARD_WEIGHT, s, m))
                if op is Op.BACKWARD and s % 2 and s < head
                else ((op, s, m),)
            )
        ]
        for name, order in orders.items()
    }


class _Pace:
    """Model time. The head is free, a gradient takes as long as a forward.

    Args:
        seconds: of an attention and of an expert unit.
        transfer: from the end of a unit to the next one's group.
        head: the head's unit.
        one_at_a_time: a group's transfers leave one after the other, as on a link; else they only delay.
    """

    def __init__(self, seconds: tuple[float, float], transfer: float, head: int, *, one_at_a_time: bool = False) -> None:
        self.seconds, self.transfer, self.head, self.one_at_a_time = seconds, transfer, head, one_at_a_time

    def of(self, unit: _Unit) -> float:
        op, s, _ = unit
        return 0.0 if s == self.head else self.seconds[s % 2] * (2 if op is Op.BACKWARD else 1)

    def arrival(self, link: dict[str, float], group: str, now: float) -> float:
        """When what a group sends now arrives. ``link`` holds until when each group's link is taken."""
        start = max(now, link.get(group, 0.0)) if self.one_at_a_time else now
        link[group] = start + self.transfer
        return link[group]


class _Run:
    """Orders from a run in model time. A group that may choose alternates; it never exceeds its bound.

    Every run ends: the first unit still missing in a group's fixed order never waits for a later one, as long as the bound is
    at least ``least_live``.
    """

    def __init__(self, groups: Mapping[str, _Group], bound: Mapping[str, int], pace: _Pace) -> None:
        self.groups, self.bound, self.pace = groups, bound, pace

    def orders(self, weights_held: int) -> _Orders:
        head = self.pace.head
        done: set[_Unit] = set()
        here: set[_Unit] = set()  # results that have reached the next unit's group
        states = {name: _State(g, self.bound[name], weights_held if g.id.role == "ffn" else 0) for name, g in self.groups.items()}
        events: list[tuple[float, int, str, _Unit]] = []
        link: dict[str, float] = {}
        now, count = 0.0, 0
        while True:
            for name, state in states.items():
                if not state.busy and (unit := state.choose(done, here, head)) is not None:
                    count += 1
                    heapq.heappush(events, (now + self.pace.of(unit), count, name, unit))
            if not events:
                break
            now = events[0][0]
            while events and events[0][0] == now:
                _, _, name, unit = heapq.heappop(events)
                if name == "":
                    here.add(unit)
                    continue
                states[name].busy = False
                done.add(unit)
                if unit[0] is not Op.BACKWARD_WEIGHT:
                    count += 1
                    gradient = unit[0] is Op.BACKWARD_INPUT or unit[1] == head
                    arrived = (Op.BACKWARD, *unit[1:]) if gradient else unit
                    heapq.heappush(events, (self.pace.arrival(link, name, now), count, "", arrived))
        stuck = [name for name, s in states.items() if s.f < len(s.group.forward) or s.b < len(s.group.backward)]
        if stuck:
            raise ScheduleError(
                f"no order found for {', '.join(stuck)} within {dict(self.bound)} live units; allow more live units"
            )
        return {name: s.order for name, s in states.items()}


class _State:
    """One group in the middle of a run."""

    def __init__(self, group: _Group, bound: int, weights_held: int) -> None:
        self.group, self.bound, self.limit = group, bound, weights_held
        self.f = self.b = 0  # next forward, next backward
        self.heads = 0  # heads done, forward and backward
        self.late: list[tuple[int, int]] = []  # weight gradients to come
        self.order: list[_Unit] = []
        self.busy = False

    def choose(self, done: set[_Unit], here: set[_Unit], head: int) -> _Unit | None:
        """The next unit to run, taken; None to wait."""
        g = self.group
        forward = backward = None
        if self.b < len(g.backward):
            s, m = g.backward[self.b]
            if (Op.FORWARD, s, m) in done and (Op.BACKWARD, s + 1, m) in here:
                backward = (s, m)
        if self.f < len(g.forward) and self.f - self.heads - self.b + len(self.late) < self.bound:
            s, m = g.forward[self.f]
            if s == 0 or (Op.FORWARD, s - 1, m) in here:
                forward = (s, m)
        if self.late and (len(self.late) >= self.limit or (forward is None and backward is None)):
            self.order.append(unit := (Op.BACKWARD_WEIGHT, *self.late.pop(0)))
            self.busy = True
            return unit
        after_backward = bool(self.order) and self.order[-1][0] is not Op.FORWARD
        if forward is not None and (backward is None or after_backward or forward[0] == head):
            unit = self._take(Op.FORWARD, forward)
            if forward[0] == head:
                self.order.append((Op.BACKWARD, *forward))
                self.heads += 1
            return unit
        return None if backward is None else self._take(Op.BACKWARD_INPUT if self.limit else Op.BACKWARD, backward)

    def _take(self, op: Op, unit: tuple[int, int]) -> _Unit:
        if op is Op.FORWARD:
            self.f += 1
        else:
            self.b += 1
        if op is Op.BACKWARD_INPUT:
            self.late.append(unit)
        self.order.append((op, *unit))
        self.busy = True
        return (op, *unit)


def _length(orders: _Orders, pace: _Pace) -> float:
    """Makespan of finished orders in model time."""
    head = pace.head
    arrivals: dict[_Unit, float] = {}
    link: dict[str, float] = {}
    at = dict.fromkeys(orders, 0)
    clock = dict.fromkeys(orders, 0.0)
    moved = True
    while moved:
        moved = False
        for name, order in orders.items():
            while at[name] < len(order):
                op, s, m = order[at[name]]
                start = clock[name]
                if (op is Op.FORWARD and s > 0) or (op in (Op.BACKWARD, Op.BACKWARD_INPUT) and s < head):
                    need = arrivals.get((Op.FORWARD, s - 1, m) if op is Op.FORWARD else (Op.BACKWARD, s + 1, m))
                    if need is None:
                        break
                    start = max(start, need)
                clock[name] = start + pace.of((op, s, m))
                if op is not Op.BACKWARD_WEIGHT and (op is not Op.FORWARD or s < head):
                    key = (Op.FORWARD if op is Op.FORWARD else Op.BACKWARD, s, m)
                    arrivals[key] = pace.arrival(link, name, clock[name])
                at[name] += 1
                moved = True
    return max(clock.values())


def _peaks(lists: Mapping[str, Sequence[_Unit]]) -> dict[str, int]:
    peaks = {}
    for name, units in lists.items():
        live = peak = 0
        for op, _, _ in units:
            live += (op is Op.FORWARD) - (op in (Op.BACKWARD, Op.BACKWARD_WEIGHT))
            peak = max(peak, live)
        peaks[name] = peak
    return peaks


def live_units(schedule: Schedule) -> dict[str, int]:
    """Most live units per group: from its forward to its full backward, or to its weight gradient where that is apart."""
    return _peaks({name: [(a.op, a.stage, a.microbatch or 0) for a in acts] for name, acts in schedule.lists.items()})
