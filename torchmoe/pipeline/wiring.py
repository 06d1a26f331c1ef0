"""Who talks to whom in a schedule: the messages around every computation, for A/F, plain and colocated pipelines.

A wiring turns the text of an action into its meaning. ``verify`` and ``simulate`` know schedules only through it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from torchmoe.errors import ConfigError, ScheduleError
from torchmoe.pipeline.action import COMPUTE, MESSAGE, Action, Op, Schedule
from torchmoe.pipeline.lower import KINDS, Messages, lower, message_layer
from torchmoe.placement import Placement, Residual

__all__ = ["DisaggregatedWiring", "End", "PipelineWiring", "Wiring", "explicit_waits"]

SENDS = frozenset({Op.SEND_F, Op.SEND_B})
FORWARD_MESSAGES = frozenset({Op.SEND_F, Op.RECV_F, Op.WAIT_F})


class End(NamedTuple):
    """One end of a message: what it is, where the other end is, and the communicator whose order it obeys.

    ``layer`` tells apart messages of one kind and micro-batch. ``unordered`` messages do not queue on their communicator: counts,
    ids and labels, which are in host memory, and the two halves of an exchange inside one group, which are one operation.
    ``paired`` halves find each other by kind, layer and micro-batch and are posted together; others meet in the order of posts.
    """

    kind: str
    layer: int
    sending: bool
    peer: str
    communicator: str
    unordered: bool = False
    paired: bool = False


class Wiring(Protocol):
    """What verify and simulate ask of a kind of schedule. Groups are the keys of the schedule's lists."""

    @property
    def groups(self) -> tuple[str, ...]: ...

    @property
    def num_stages(self) -> int: ...

    def size(self, group: str) -> int:
        """Ranks of a group (of one replica)."""

    def group_of(self, stage: int) -> str: ...

    def end(self, action: Action) -> End:
        """Meaning of a SEND, RECV or WAIT. Raises ScheduleError if the unit has no such message."""

    def before(self, action: Action) -> tuple[Action, ...]:
        """What the group must have done before a computation or a SEND: computations of its own, and WAITs."""

    def after(self, action: Action) -> tuple[Action, ...]:
        """The SENDs that this computation owes."""

    def pairs(self, end: End, group: str) -> int:
        """Messages between single ranks that one message between groups stands for, at most."""

    def lower(self, schedule: Schedule) -> Schedule:
        """The schedule with every message."""

    def computations(self, schedule: Schedule) -> set[Action]:
        """Every computation of a complete step, without micro-batch, a backward as B."""


def explicit_waits(schedule: Schedule, wiring: Wiring) -> Schedule:
    """torch's lowered tables have no waits: put each receive's wait directly before the computation that needs it."""
    if any(a.op in (Op.WAIT_F, Op.WAIT_B) for acts in schedule.lists.values() for a in acts):
        return schedule

    def waits(acts: Sequence[Action]) -> Iterator[Action]:
        for a in acts:
            for part in a.parts:
                if part.op in COMPUTE:
                    yield from (w for w in wiring.before(part) if w.op in MESSAGE)
            yield a

    lists = {g: tuple(waits(acts)) for g, acts in schedule.lists.items()}
    return Schedule(lists, schedule.num_microbatches, schedule.lowered, schedule.forward_only)


class DisaggregatedWiring:
    """A and F groups of a placement. All replicas run the same lists and never talk to each other inside a step."""

    def __init__(
        self, placement: Placement, *, residual: Residual | None = None, look_ahead: int = 1, fixed_sizes: bool = False
    ) -> None:
        self.placement, self.look_ahead, self.fixed_sizes = placement, look_ahead, fixed_sizes
        self.residual: Residual = placement.default_residual if residual is None else residual
        placement.check_residual(self.residual)
        self._messages = Messages(placement, self.residual, fixed_sizes)
        self._sizes = {str(g): placement.size(g) for g in placement.groups()}
        self._homes = [str(placement.stage_group(s)) for s in range(self.num_stages)]

    @property
    def groups(self) -> tuple[str, ...]:
        return tuple(self._sizes)

    @property
    def num_stages(self) -> int:
        return 2 * self.placement.num_layers + 1

    def size(self, group: str) -> int:
        return self._sizes[group]

    def group_of(self, stage: int) -> str:
        return self._homes[stage]

    def end(self, action: Action) -> End:
        layer = message_layer(action)
        kind = action.edge or ""
        sending = action.op in SENDS
        forward = KINDS[kind].forward
        kinds = self._messages.sent(action.stage, forward) if sending else self._messages.received(action.stage, forward)
        if kind not in kinds or layer >= self.placement.num_layers:
            raise ScheduleError(
                f"{action}: unit {action.stage} of this placement has no such message (it has {', '.join(kinds) or 'none'})"
            )
        edge = self.placement.edge(kind, layer)
        peer = str(edge[1] if sending else edge[0])
        paired = edge[0] == edge[1]
        unordered = paired or kind in ("counts", "ids", "labels")
        return End(kind, layer, sending, peer, self.placement.communicator(kind, layer), unordered, paired)

    def before(self, action: Action) -> tuple[Action, ...]:
        s, m, forward = action.stage, action.microbatch, action.op is Op.FORWARD
        if action.op is Op.BACKWARD_WEIGHT:
            return (Action(s, Op.BACKWARD_INPUT, m),)
        if action.op in SENDS:
            return (Action(s, Op.FORWARD if action.op is Op.SEND_F else Op.BACKWARD, m),)
        wait = Op.WAIT_F if forward else Op.WAIT_B
        own = () if forward else (Action(s, Op.FORWARD, m),)
        return (*own, *(Action(s, wait, m, kind) for kind in self._messages.received(s, forward)))

    def after(self, action: Action) -> tuple[Action, ...]:
        if action.op is Op.BACKWARD_WEIGHT:
            return ()
        forward = action.op is Op.FORWARD
        send = Op.SEND_F if forward else Op.SEND_B
        return tuple(Action(action.stage, send, action.microbatch, kind) for kind in self._messages.sent(action.stage, forward))

    def pairs(self, end: End, group: str) -> int:
        mine, peer = self._sizes[group], self._sizes[end.peer]
        if end.kind in ("ids", "labels", "residual", "d_residual"):  # only ranks that share sequences: all cuts of both
            cuts = {i * peer for i in range(mine + 1)} | {i * mine for i in range(peer + 1)}
            return len(cuts) - 1
        return mine * peer

    def lower(self, schedule: Schedule) -> Schedule:
        return lower(schedule, self.placement, residual=self.residual, look_ahead=self.look_ahead, fixed_sizes=self.fixed_sizes)

    def computations(self, schedule: Schedule) -> set[Action]:
        ops = (Op.FORWARD,) if schedule.forward_only else (Op.FORWARD, Op.BACKWARD)
        return {Action(s, op) for s in range(self.num_stages) for op in ops}


class PipelineWiring:
    """A plain pipeline: stage s sends activations (``act``) to s + 1 and gets gradients (``grad``) back; group = rank.

    Neighbouring stages on one group hand over without a message. Each (kind, source, destination) has its own communicator.

    Args:
        homes: group of every stage.
        sizes: ranks per group, default 1 each (data parallel copies talk to their own index only).
    """

    def __init__(self, homes: Sequence[str], sizes: Mapping[str, int] | None = None) -> None:
        self.homes = tuple(homes)
        self._sizes = dict.fromkeys(sorted(set(homes), key=self.homes.index), 1) | dict(sizes or {})

    @classmethod
    def of(cls, schedule: Schedule) -> PipelineWiring:
        """The wiring that a schedule's own lists imply.

        Raises:
            ScheduleError: a stage on two groups, or a missing stage.
        """
        homes: dict[int, str] = {}
        for group, acts in schedule.lists.items():
            for a in (p for x in acts for p in x.parts if p.op in COMPUTE):
                if homes.setdefault(a.stage, group) != group:
                    raise ScheduleError(f"stage {a.stage} runs on {homes[a.stage]} and on {group}; keep each stage on one group")
        missing = sorted(set(range(max(homes, default=-1) + 1)) - set(homes))
        if missing or not homes:
            raise ScheduleError(f"stages {missing} have no computation; stages count from 0 without a hole")
        return cls([homes[s] for s in range(len(homes))], dict.fromkeys(schedule.lists, 1))

    @property
    def groups(self) -> tuple[str, ...]:
        return tuple(self._sizes)

    @property
    def num_stages(self) -> int:
        return len(self.homes)

    def size(self, group: str) -> int:
        return self._sizes[group]

    def group_of(self, stage: int) -> str:
        return self.homes[stage]

    def _crosses(self, boundary: int) -> bool:
        """Whether the hand-over between stages ``boundary`` and ``boundary + 1`` is a message."""
        return 0 <= boundary < len(self.homes) - 1 and self.homes[boundary] != self.homes[boundary + 1]

    def end(self, action: Action) -> End:
        sending, forward = action.op in SENDS, action.op in FORWARD_MESSAGES
        kind = "act" if forward else "grad"
        boundary = action.stage if sending == forward else action.stage - 1
        if action.edge not in (None, kind) or not self._crosses(boundary):
            raise ScheduleError(f"{action}: stages {boundary} and {boundary + 1} exchange no such message")
        peer = self.homes[boundary + 1 if action.stage == boundary else boundary]
        ends = (self.homes[action.stage], peer) if sending else (peer, self.homes[action.stage])
        return End(kind, boundary, sending, peer, f"{kind}:{ends[0]}>{ends[1]}")

    def before(self, action: Action) -> tuple[Action, ...]:
        s, m = action.stage, action.microbatch
        if action.op is Op.BACKWARD_WEIGHT:
            return (Action(s, Op.BACKWARD_INPUT, m),)
        if action.op in SENDS:
            return (Action(s, Op.FORWARD if action.op is Op.SEND_F else Op.BACKWARD, m),)
        if action.op is Op.FORWARD:
            if s == 0:
                return ()
            return (Action(s, Op.WAIT_F, m, "act") if self._crosses(s - 1) else Action(s - 1, Op.FORWARD, m),)
        own = Action(s, Op.FORWARD, m)
        if s == len(self.homes) - 1:
            return (own,)
        return (own, Action(s, Op.WAIT_B, m, "grad") if self._crosses(s) else Action(s + 1, Op.BACKWARD, m))

    def after(self, action: Action) -> tuple[Action, ...]:
        s, m = action.stage, action.microbatch
        if action.op is Op.FORWARD:
            return (Action(s, Op.SEND_F, m, "act"),) if self._crosses(s) else ()
        if action.op is Op.BACKWARD_WEIGHT:
            return ()
        return (Action(s, Op.SEND_B, m, "grad"),) if self._crosses(s - 1) else ()

    def pairs(self, end: End, group: str) -> int:
        return max(self._sizes[group], self._sizes[end.peer])

    def lower(self, schedule: Schedule) -> Schedule:
        """Receive, wait, compute, send; a receive is posted one computation ahead."""
        if schedule.lowered:
            raise ScheduleError("the schedule has messages already; pass the compute-only form")
        lists = {}
        for group, acts in schedule.lists.items():
            out: list[Action] = []
            needs = [[w for part in a.parts if part.op in COMPUTE for w in self.before(part) if w.op in MESSAGE] for a in acts]
            posts = [[w._replace(op=Op.RECV_F if w.op is Op.WAIT_F else Op.RECV_B) for w in ws] for ws in needs] + [[]]
            out += posts[0]
            for i, a in enumerate(acts):
                out += [*posts[i + 1], *needs[i], a, *(x for part in a.parts if part.op in COMPUTE for x in self.after(part))]
            lists[group] = tuple(out)
        return Schedule(lists, schedule.num_microbatches, lowered=True, forward_only=schedule.forward_only)

    def computations(self, schedule: Schedule) -> set[Action]:
        ops = (Op.FORWARD,) if schedule.forward_only else (Op.FORWARD, Op.BACKWARD)
        return {Action(s, op) for s in range(self.num_stages) for op in ops}


def default_wiring(schedule: Schedule, where: Wiring | Placement | None, *, residual: Residual | None = None) -> Wiring:
    """A placement means A and F groups; nothing means a plain pipeline read off the lists."""
    if isinstance(where, Placement):
        counted = any(a.edge == "counts" for acts in schedule.lists.values() for a in acts)
        return DisaggregatedWiring(where, residual=residual, fixed_sizes=schedule.lowered and not counted)
    if residual is not None:
        raise ConfigError(f"residual={residual!r} belongs to a placement; pass the placement, or leave residual out")
    return PipelineWiring.of(schedule) if where is None else where
