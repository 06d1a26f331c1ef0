"""AF-Pipe (DisagMoE, section 4.2): forward goes A -> F -> next A, gradients come back, both pools stay busy.

The order is an interleaved 1F1B over the chain of groups ``A0 F0 A1 F1 ...``: a group issues ``cycle`` micro-batches of its first
unit, then of its next one, and so on; after a warm-up it alternates one forward and one backward. A cycle of 2p micro-batches
fills the chain; 4p also covers the M2N and N2M transfers between two stages, which are stages of their own in the paper.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import accumulate

from torchmoe.errors import ConfigError, ScheduleError
from torchmoe.pipeline.action import Action, Op, Schedule
from torchmoe.placement import GroupId, Placement

__all__ = ["afpipe", "cycles", "default_cycle", "live_units"]

_Unit = tuple[Op, int, int]  # F or B, unit, micro-batch


def default_cycle(placement: Placement) -> int:
    """4p micro-batches with p the larger number of groups: hides one transfer per stage at the price of more live units."""
    return 4 * max(len(placement.attention), len(placement.ffn))


def cycles(num_microbatches: int, cycle: int) -> tuple[int, ...]:
    """Lengths of the cycles: floor(n / cycle) of them, equal up to one (a short last cycle deadlocks), longest first."""
    count = max(1, num_microbatches // cycle)
    base, more = divmod(num_microbatches, count)
    return tuple(base + (i < more) for i in range(count))


def afpipe(
    placement: Placement,
    num_microbatches: int,
    *,
    cycle: int | None = None,
    max_live: int | None = None,
    weight_delay: int = 0,
    forward_only: bool = False,
) -> Schedule:
    """The compute order of every group (``A0``, ``F0``, ...) for one step; :func:`torchmoe.pipeline.lower.lower` adds messages.

    Args:
        placement: groups and layers; p need not divide L, and the two roles may have different numbers of groups.
        num_microbatches: micro-batches of one step, any number from 1 (cycles are made equal up to one).
        cycle: micro-batches a group issues per unit before its next unit; from 2p, default 4p.
        max_live: at most so many live units (one micro-batch on one unit) on any group; default: what the order needs,
            2(2p-r-1)+(v-1)G+1 on group r of the chain.
        weight_delay: 0 keeps an expert unit's backward whole (``B``). k > 0 splits it into ``I`` and ``W``, and puts each ``W``
            k backward units later, where it fills a bubble; up to k units' rows and gradients are held meanwhile.
        forward_only: forwards only, for validation.

    Raises:
        ConfigError: a cycle below 2p, fewer live units than a cycle needs, a negative delay, no micro-batch.
    """
    p = max(len(placement.attention), len(placement.ffn))
    cycle = default_cycle(placement) if cycle is None else cycle
    if num_microbatches < 1:
        raise ConfigError(f"num_microbatches={num_microbatches} must be at least 1; give every step a micro-batch")
    if cycle < 2 * p:
        raise ConfigError(
            f"cycle={cycle} with {p} groups per role: below 2p = {2 * p} a backward waits for a forward behind it; "
            f"use {2 * p} or more"
        )
    if weight_delay < 0:
        raise ConfigError(f"weight_delay={weight_delay} counts backward units and must be 0 or more; use 0 for whole backwards")
    lengths = cycles(num_microbatches, cycle)
    groups = {str(g): _Group(g, placement, lengths) for g in placement.groups()}
    if max_live is not None:
        for g in groups.values():
            if max_live < g.least_live:
                raise ConfigError(
                    f"max_live={max_live}: {g.id} needs {g.least_live} live units for its first backward "
                    f"({len(g.units)} units, cycles of {max(lengths)}); allow that many, use a shorter cycle or more groups"
                )
    if forward_only:
        lists = {name: tuple(Action(s, Op.FORWARD, m) for s, m in g.forward) for name, g in groups.items()}
        return Schedule(lists, num_microbatches, forward_only=True)
    if len(placement.attention) == len(placement.ffn) and max_live is None:
        orders = {name: _chain_order(g, p, placement.num_layers, lengths) for name, g in groups.items()}
    else:
        orders = _greedy_orders(groups, 2 * placement.num_layers, max_live)
    head = 2 * placement.num_layers
    return Schedule({name: _finish(order, head, weight_delay) for name, order in orders.items()}, num_microbatches)


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
        self.backward = [(s, m) for block in blocks for s in reversed(units) for m in block]

    @property
    def least_live(self) -> int:
        """Forwards before the first backward can be served: every unit but the last for a whole cycle, then one (or all)."""
        return len(self.units) * self.longest if self.waits_for_cycle else (len(self.units) - 1) * self.longest + 1


def _chain_order(group: _Group, p: int, num_layers: int, lengths: Sequence[int]) -> list[_Unit]:
    """Interleaved 1F1B of group r of the chain of 2p: warm-up of 2(2p-r-1) + (v-1)G forwards, then pairs, then backwards.

    v is padded to the longest chain and units past the head are left out, so that all groups count alike.
    """
    width, num_units = 2 * p, 2 * num_layers + 1
    r = 2 * group.id.index + (group.id.role == "ffn")
    v = -(-num_units // width)
    starts = [0, *accumulate(lengths)]
    forward = [(c, m) for a, n in zip(starts, lengths, strict=False) for c in range(v) for m in range(a, a + n)]
    backward = [(v - 1 - c, m) for c, m in forward]
    warm = min(2 * (width - r - 1) + (v - 1) * max(lengths), len(forward))
    order: list[tuple[Op, int, int]] = [(Op.FORWARD, c, m) for c, m in forward[:warm]]
    for i in range(len(forward) - warm):
        order += [(Op.FORWARD, *forward[warm + i]), (Op.BACKWARD, *backward[i])]
    order += [(Op.BACKWARD, *u) for u in backward[len(forward) - warm :]]
    return [(op, c * width + r, m) for op, c, m in order if c * width + r < num_units]


def _greedy_orders(groups: dict[str, _Group], head: int, max_live: int | None) -> dict[str, list[_Unit]]:
    """Orders from a run with equal unit times: the next backward if it has arrived, else the next forward below the bound.

    The fixed orders of :class:`_Group` make every run end: the first unit still missing in a group's order never waits for a
    later one, as long as the bound is at least ``least_live``.
    """
    # As in the chain: a round trip from the group's last unit to the head and back takes two slots per unit on the way.
    bound = {n: min(g.least_live + 2 * (head - g.units[-1]), max_live or len(g.forward)) for n, g in groups.items()}
    done: set[_Unit] = set()
    orders: dict[str, list[_Unit]] = {n: [] for n in groups}
    at = {n: [0, 0] for n in groups}  # next forward, next backward
    busy: set[str] = set()
    ends: list[tuple[int, int, str, _Unit]] = []
    now = count = 0

    def start(name: str) -> None:
        g, (f, b) = groups[name], at[name]
        if b < len(g.backward):
            s, m = g.backward[b]
            if (Op.FORWARD, s, m) in done and (s == head or (Op.BACKWARD, s + 1, m) in done):
                at[name][1] += 1
                return push(name, (Op.BACKWARD, s, m))
        if f < len(g.forward) and f - b < bound[name]:
            s, m = g.forward[f]
            if s == 0 or (Op.FORWARD, s - 1, m) in done:
                at[name][0] += 1
                return push(name, (Op.FORWARD, s, m))
        return None

    def push(name: str, unit: _Unit) -> None:
        nonlocal count
        busy.add(name)
        orders[name].append(unit)
        count += 1
        heapq.heappush(ends, (now + 1, count, name, unit))

    for name in groups:
        start(name)
    while ends:
        now = ends[0][0]
        while ends and ends[0][0] == now:
            _, _, name, unit = heapq.heappop(ends)
            busy.discard(name)
            done.add(unit)
        for name in groups:
            if name not in busy:
                start(name)
    if len(done) < 2 * sum(len(g.forward) for g in groups.values()):
        stuck = {n: len(o) for n, o in orders.items() if len(o) < 2 * len(groups[n].forward)}
        raise ScheduleError(f"no order found for {stuck} within max_live={max_live}; allow more live units")
    return orders


def _finish(order: list[_Unit], head: int, weight_delay: int) -> tuple[Action, ...]:
    """The head's backward directly after its forward (else many micro-batches of logits live at once); weight gradients late."""
    out: list[Action] = []
    late: list[Action] = []
    for op, s, m in order:
        if s == head:
            if op is Op.FORWARD:
                out += [Action(s, Op.FORWARD, m), Action(s, Op.BACKWARD, m)]
        elif op is Op.BACKWARD and s % 2 and weight_delay:
            out.append(Action(s, Op.BACKWARD_INPUT, m))
            late.append(Action(s, Op.BACKWARD_WEIGHT, m))
            if len(late) > weight_delay:
                out.append(late.pop(0))
        else:
            out.append(Action(s, op, m))
    return tuple(out + late)


def live_units(schedule: Schedule) -> dict[str, int]:
    """Most live units per group: from its forward to its full backward, or to its weight gradient where that is apart."""
    peaks = {}
    for name, actions in schedule.lists.items():
        live = peak = 0
        for a in actions:
            live += (a.op is Op.FORWARD) - (a.op in (Op.BACKWARD, Op.BACKWARD_WEIGHT))
            peak = max(peak, live)
        peaks[name] = peak
    return peaks
