"""Lowering: from the order of computations to every message, and what a message of a lowered schedule is.

Unit 2l is the attention of MoE layer l, 2l + 1 its experts, 2L the head. The unit named in an action is the one that acts, so
``2SEND_F0:dispatch`` and ``3RECV_F0:dispatch`` are the two ends of one message, of layer 1 and micro-batch 0.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from torchmoe.errors import ConfigError, ScheduleError
from torchmoe.pipeline.action import Action, Op, Schedule
from torchmoe.placement import Placement, Residual

__all__ = ["KINDS", "Kind", "Messages", "lower", "message_layer"]

_RECV, _WAIT, _SEND = ("RECV", "WAIT", "SEND")


class Kind(NamedTuple):
    """One kind of message: which units of layer l send and receive it, and its direction.

    ``source`` and ``destination`` are added to 2l: 0 is the attention, 1 the experts, 2 the next attention or the head.
    """

    source: int
    destination: int
    forward: bool


KINDS: dict[str, Kind] = {
    "counts": Kind(0, 1, True),
    "dispatch": Kind(0, 1, True),
    "ids": Kind(0, 2, True),
    "residual": Kind(0, 2, True),
    "combine": Kind(1, 2, True),
    "labels": Kind(0, 2, True),
    "d_combine": Kind(2, 1, False),
    "d_residual": Kind(2, 0, False),
    "d_dispatch": Kind(1, 0, False),
}


def message_layer(action: Action) -> int:
    """MoE layer of a message action of a lowered A/F schedule.

    Raises:
        ScheduleError: no message, or the kind does not start or end at this unit.
    """
    kind = KINDS.get(action.edge or "")
    if kind is None:
        raise ScheduleError(f"{action} is not a message between A and F; its edge must be one of {', '.join(KINDS)}")
    sending = action.op in (Op.SEND_F, Op.SEND_B)
    offset = kind.source if sending else kind.destination
    forward = action.op in (Op.SEND_F, Op.RECV_F, Op.WAIT_F)
    if forward != kind.forward or action.stage < offset or (action.stage - offset) % 2:
        raise ScheduleError(
            f"{action}: a {action.edge} message is {'sent' if sending else 'received'} in the "
            f"{'forward' if kind.forward else 'backward'} of unit 2l + {offset}; name that unit"
        )
    return (action.stage - offset) // 2


def lower(
    schedule: Schedule,
    placement: Placement,
    *,
    residual: Residual | None = None,
    look_ahead: int = 1,
    fixed_sizes: bool = False,
) -> Schedule:
    """Put every send, receive and wait into a compute-only A/F schedule.

    A receive is posted when its unit is next, or up to ``look_ahead`` units of its direction earlier if its size is known then:
    counts and ids have a fixed size; a combine is known once its layer's attention ran on this rank (one attention group) or
    once the ids are here; backward messages once the unit's forward has run. Waits for counts and ids are never moved ahead, but
    with fixed sizes (an exchange with ``sizes="fixed"``) a dispatch needs no counts and is posted ahead like the others.

    Args:
        schedule: compute-only lists of the groups of ``placement``.
        placement: groups and layers.
        residual: how the residual travels; default ``placement.default_residual``.
        look_ahead: units per direction whose receives may be posted early; 0 posts each at its own unit.
        fixed_sizes: there are no counts; for an exchange that never sends them.

    Raises:
        ScheduleError: already lowered, or a unit on the wrong group.
        ConfigError: a residual form that the placement refuses, a negative look-ahead.
    """
    residual = placement.default_residual if residual is None else residual
    placement.check_residual(residual)
    if look_ahead < 0:
        raise ConfigError(f"look_ahead={look_ahead} counts units and must be 0 or more; use 1 for the default")
    if schedule.lowered:
        raise ScheduleError("the schedule has messages already; pass the compute-only form")
    messages = Messages(placement, residual, fixed_sizes)
    lists = {}
    for name, actions in schedule.lists.items():
        _check_group(name, actions, placement)
        lists[name] = tuple(_lower_group(actions, messages, look_ahead))
    return Schedule(lists, schedule.num_microbatches, lowered=True, forward_only=schedule.forward_only)


def _check_group(name: str, actions: Iterable[Action], placement: Placement) -> None:
    for a in actions:
        if not a.is_compute or a.microbatch is None:
            raise ScheduleError(f"{a} in the list of {name}: a compute-only A/F schedule has F, B, I and W with a micro-batch")
        if a.stage > 2 * placement.num_layers or str(placement.stage_group(a.stage)) != name:
            where = "past the head" if a.stage > 2 * placement.num_layers else f"on {placement.stage_group(a.stage)}"
            raise ScheduleError(f"{a} is in the list of {name}, but unit {a.stage} is {where}; give each group its own units")


class Messages:
    """What each unit receives and sends, in order."""

    def __init__(self, placement: Placement, residual: Residual, fixed_sizes: bool = False) -> None:
        self.placement, self.residual, self.fixed_sizes = placement, residual, fixed_sizes
        self.head = 2 * placement.num_layers

    def _those(self, layer: int, *kinds: str) -> tuple[str, ...]:
        there = (k for k in kinds if self.placement.has_edge(k, layer, self.residual))
        return tuple(k for k in there if k != "counts" or not self.fixed_sizes)

    def received(self, stage: int, forward: bool) -> tuple[str, ...]:
        if stage % 2:
            return self._those(stage // 2, "counts", "dispatch") if forward else ("d_combine",)
        layer = stage // 2
        if forward:
            return () if stage == 0 else self._those(layer - 1, "ids", "labels", "combine", "residual")
        return () if stage == self.head else self._those(layer, "d_dispatch", "d_residual")

    def sent(self, stage: int, forward: bool) -> tuple[str, ...]:
        if stage % 2:
            return ("combine",) if forward else ("d_dispatch",)
        layer = stage // 2
        if forward:
            return () if stage == self.head else self._those(layer, "counts", "ids", "labels", "dispatch", "residual")
        return () if stage == 0 else self._those(layer - 1, "d_combine", "d_residual")

    def sized_here(self, stage: int) -> bool:
        """Whether a combine's size is known once the attention below has run, because that is on the same group."""
        return not self.placement.hands_over(stage // 2 - 1)


_SIZERS = ("counts", "ids", "labels")  # their content gives the size of the messages after them


class _Receives:
    """The receives of one direction of one group, posted in the order of its units."""

    def __init__(self, units: list[tuple[int, int]], messages: Messages, forward: bool, look_ahead: int) -> None:
        self.messages, self.forward, self.look_ahead = messages, forward, look_ahead
        self.queue = [(s, m, kind) for s, m in units for kind in messages.received(s, forward)]
        self.index = {u: i for i, u in enumerate(units)}
        self.next = 0  # unit that runs next in this direction
        self.posted: set[tuple[int, int, str]] = set()
        self.position = 0  # first entry of the queue that may still be unposted

    def post(self, s: int, m: int, kind: str) -> list[Action]:
        if (s, m, kind) in self.posted:
            return []
        self.posted.add((s, m, kind))
        return [Action(s, Op.RECV_F if self.forward else Op.RECV_B, m, kind)]

    def wait(self, s: int, m: int, kind: str) -> Action:
        return Action(s, Op.WAIT_F if self.forward else Op.WAIT_B, m, kind)

    def ahead(self, limit: int, ran: set[tuple[int, int]], only: tuple[str, ...] = tuple(KINDS)) -> list[Action]:
        """Receives of the units before position ``limit`` whose sizes are known; each kind stays in the order of its units."""
        out: list[Action] = []
        blocked: set[str] = set()
        while self.position < len(self.queue) and self.queue[self.position] in self.posted:
            self.position += 1
        for i in range(self.position, len(self.queue)):
            s, m, kind = self.queue[i]
            if self.index[s, m] >= limit:
                break
            if (s, m, kind) in self.posted or kind in blocked or kind not in only:
                continue
            if kind in _SIZERS or self._size_known(s, m, kind, ran):
                out += self.post(s, m, kind)
            else:
                blocked.add(kind)
        return out

    def _size_known(self, s: int, m: int, kind: str, ran: set[tuple[int, int]]) -> bool:
        if not self.forward:
            return (s, m) in ran
        if kind == "dispatch":
            return self.messages.fixed_sizes
        return kind == "combine" and self.messages.sized_here(s) and (s - 2, m) in ran


def _lower_group(actions: tuple[Action, ...], messages: Messages, look_ahead: int) -> list[Action]:
    units = {fwd: [(a.stage, a.microbatch or 0) for a in actions if _direction(a) is fwd] for fwd in (True, False)}
    receives = {fwd: _Receives(units[fwd], messages, fwd, look_ahead) for fwd in (True, False)}
    out: list[Action] = []
    ran: set[tuple[int, int]] = set()
    for a in actions:
        forward = _direction(a)
        if forward is None:  # weight gradients alone exchange nothing
            out.append(a)
            continue
        s, m = a.stage, a.microbatch or 0
        mine, other = receives[forward], receives[not forward]
        kinds = messages.received(s, forward)
        first = [kind for kind in kinds if kind in _SIZERS]
        rest = [kind for kind in kinds if kind not in _SIZERS]
        for kind in first:
            out += mine.post(s, m, kind)
        if first and look_ahead:
            out += mine.ahead(mine.next + 1 + look_ahead, ran, _SIZERS)
        out += [mine.wait(s, m, kind) for kind in first]
        for kind in rest:
            out += mine.post(s, m, kind)
        if look_ahead:
            out += mine.ahead(mine.next + 1 + look_ahead, ran) + other.ahead(other.next + look_ahead, ran)
        out += [mine.wait(s, m, kind) for kind in rest]
        out += _compute(a, messages)
        if forward:
            ran.add((s, m))
        mine.next += 1
    return out


def _direction(a: Action) -> bool | None:
    """True for a forward, False for what receives a gradient, None for a weight gradient alone."""
    return None if a.op is Op.BACKWARD_WEIGHT else a.op is Op.FORWARD


def _compute(a: Action, messages: Messages) -> list[Action]:
    """The computation and its sends; a whole backward of experts sends before it computes the weight gradients."""
    s, m = a.stage, a.microbatch
    if a.op is Op.FORWARD:
        return [a, *(Action(s, Op.SEND_F, m, kind) for kind in messages.sent(s, True))]
    sends = [Action(s, Op.SEND_B, m, kind) for kind in messages.sent(s, False)]
    if a.op is Op.BACKWARD and s % 2:
        return [Action(s, Op.BACKWARD_INPUT, m), *sends, Action(s, Op.BACKWARD_WEIGHT, m)]
    return [a, *sends]
