"""Colocated expert parallelism with its all-to-alls as actions: the baselines that AF-Pipe is compared with.

Every rank holds attention and experts of its stage's layers. Unit 2l is the attention of layer l, 2l + 1 its experts, 2L the
head; the group of a pipeline stage is one expert-parallel group. A layer is ``2lF``, all-to-all ``dispatch``, ``(2l+1)F``,
all-to-all ``combine`` back at 2l; backward in reverse. ``act`` and ``d_act`` cross stage boundaries.

* blocking: each all-to-all is waited for where it is needed.
* ``a2a_chunks=k``: the tokens go in k parts, so that part i is computed while part i+1 travels (Tutel, Comet).
* ``overlap=True``: the forward of one micro-batch and the backward of another take turns, so that each one's transfers hide
  behind the other's computation (DualPipe).
"""

from __future__ import annotations

from dataclasses import dataclass

from torchmoe.errors import ConfigError, ScheduleError
from torchmoe.pipeline.action import MESSAGE, Action, Op, Schedule
from torchmoe.pipeline.schedules.pipeline import check_counts, interleaved_order
from torchmoe.pipeline.wiring import FORWARD_MESSAGES, SENDS, End

__all__ = ["ColocatedWiring", "colocated"]

_KINDS = ("dispatch", "combine", "d_combine", "d_dispatch", "act", "d_act")


@dataclass(frozen=True, kw_only=True)
class ColocatedWiring:
    """Messages of colocated expert parallelism over ``num_groups`` pipeline stages of ``ep_size`` ranks each.

    Args:
        num_layers: MoE layers, a multiple of num_groups * num_chunks.
        ep_size: ranks of one expert-parallel group.
        num_groups: pipeline stages.
        num_chunks: layer chunks per pipeline stage (interleaving).
        a2a_chunks: parts of every all-to-all.
    """

    num_layers: int
    ep_size: int
    num_groups: int = 1
    num_chunks: int = 1
    a2a_chunks: int = 1

    def __post_init__(self) -> None:
        check_counts(num_layers=self.num_layers, ep_size=self.ep_size, num_groups=self.num_groups, num_chunks=self.num_chunks)
        check_counts(a2a_chunks=self.a2a_chunks)
        if self.num_layers % (self.num_groups * self.num_chunks):
            raise ConfigError(
                f"num_layers={self.num_layers} does not split into {self.num_groups} stages of {self.num_chunks} chunks; "
                "use a divisor"
            )

    @property
    def groups(self) -> tuple[str, ...]:
        return tuple(str(g) for g in range(self.num_groups))

    @property
    def num_stages(self) -> int:
        return 2 * self.num_layers + 1

    @property
    def layers_per_chunk(self) -> int:
        return self.num_layers // (self.num_groups * self.num_chunks)

    def size(self, group: str) -> int:
        return self.ep_size

    def group_of(self, stage: int) -> str:
        return str(min(stage // 2, self.num_layers - 1) // self.layers_per_chunk % self.num_groups)

    def crosses(self, layer: int) -> bool:
        """Whether layers ``layer`` and ``layer + 1`` are on different groups."""
        return 0 <= layer < self.num_layers - 1 and self.group_of(2 * layer) != self.group_of(2 * layer + 2)

    # ---- names of parts
    def parts(self, kind: str) -> tuple[str, ...]:
        """The edges of one all-to-all: its kind, or ``kind.i`` for each part."""
        return (kind,) if self.a2a_chunks == 1 else tuple(f"{kind}.{i}" for i in range(self.a2a_chunks))

    def expert_parts(self, op: Op, stage: int, microbatch: int | None) -> tuple[Action, ...]:
        if self.a2a_chunks == 1:
            return (Action(stage, op, microbatch),)
        return tuple(Action(stage, op, microbatch, f"chunk.{i}") for i in range(self.a2a_chunks))

    # ---- the wiring
    def end(self, action: Action) -> End:
        edge = action.edge or ""
        kind = edge.split(".")[0]
        sending, forward = action.op in SENDS, action.op in FORWARD_MESSAGES
        home = kind in ("dispatch", "d_combine")  # sent by the attention's side
        layer, odd = divmod(action.stage, 2)
        fits = kind in _KINDS and forward == (not kind.startswith("d_")) and action.stage < 2 * self.num_layers
        if kind in ("act", "d_act"):
            boundary = layer if sending == forward else layer - 1
            if not fits or odd or edge != kind or not self.crosses(boundary):
                raise ScheduleError(f"{action}: layers {boundary} and {boundary + 1} exchange no such message")
            ends = (self.group_of(2 * boundary), self.group_of(2 * boundary + 2))
            peer = ends[layer == boundary]
            return End(kind, boundary, sending, peer, f"{kind}:{'>'.join(ends if forward else ends[::-1])}")
        if not fits or edge not in self.parts(kind) or odd == (sending == home):
            raise ScheduleError(f"{action}: unit {action.stage} has no such part of an all-to-all of {self.a2a_chunks} parts")
        group = self.group_of(action.stage)
        # The two halves of an all-to-all are one operation of a collective, so they do not queue behind each other.
        return End(edge, layer, sending, group, f"{kind}:{group}", unordered=True)

    def before(self, action: Action) -> tuple[Action, ...]:
        s, m, kind = action.stage, action.microbatch, (action.edge or "").split(".")[0]
        layer, experts = divmod(s, 2)
        part = (action.edge or "").partition(".")[2]
        dot = f".{part}" if part else ""
        if action.op is Op.BACKWARD_WEIGHT:
            return (action._replace(op=Op.BACKWARD_INPUT),)
        if action.op in MESSAGE:  # of sends only
            if kind == "act":
                return self._waits(Op.WAIT_F, s, m, "combine")
            if kind == "d_act":
                return (Action(s, Op.BACKWARD, m),)
            if kind == "d_combine":
                return (Action(s, Op.WAIT_B, m, "d_act") if self.crosses(layer) else Action(s + 2, Op.BACKWARD, m),)
            return (
                Action(
                    s,
                    Op.FORWARD if kind in ("dispatch", "combine") else Op.BACKWARD,
                    m,
                    f"chunk{dot}" if experts and part else None,
                ),
            )
        if experts:
            if action.op is Op.FORWARD:
                return (Action(s, Op.WAIT_F, m, "dispatch" + dot),)
            return (action._replace(op=Op.FORWARD), Action(s, Op.WAIT_B, m, "d_combine" + dot))
        if action.op is Op.FORWARD:
            if s == 0:
                return ()
            return (Action(s, Op.WAIT_F, m, "act"),) if self.crosses(layer - 1) else self._waits(Op.WAIT_F, s - 2, m, "combine")
        own = (Action(s, Op.FORWARD, m),)
        return own if layer == self.num_layers else own + self._waits(Op.WAIT_B, s, m, "d_dispatch")

    def _waits(self, op: Op, stage: int, microbatch: int | None, kind: str) -> tuple[Action, ...]:
        return tuple(Action(stage, op, microbatch, edge) for edge in self.parts(kind))

    def after(self, action: Action) -> tuple[Action, ...]:
        s, m = action.stage, action.microbatch
        layer, experts = divmod(s, 2)
        forward = action.op is Op.FORWARD
        if action.op is Op.BACKWARD_WEIGHT:
            return ()
        if experts:
            part = (action.edge or "").partition(".")[2]
            kind = ("combine" if forward else "d_dispatch") + (f".{part}" if part else "")
            return (Action(s, Op.SEND_F if forward else Op.SEND_B, m, kind),)
        if forward:
            if layer == self.num_layers:
                return ()
            act = (Action(s, Op.SEND_F, m, "act"),) if self.crosses(layer) else ()
            return (*self._waits(Op.SEND_F, s, m, "dispatch"), *act)
        if layer == 0:
            return ()
        if self.crosses(layer - 1):
            return (Action(s, Op.SEND_B, m, "d_act"),)
        return self._waits(Op.SEND_B, s - 2, m, "d_combine")

    def pairs(self, end: End, group: str) -> int:
        return self.ep_size if end.kind in ("act", "d_act") else self.ep_size * (self.ep_size - 1)

    def lower(self, schedule: Schedule) -> Schedule:
        raise ScheduleError("a colocated schedule is made with its messages; use colocated()")

    def computations(self, schedule: Schedule) -> set[Action]:
        ops = (Op.FORWARD,) if schedule.forward_only else (Op.FORWARD, Op.BACKWARD)
        return {
            a
            for s in range(self.num_stages)
            for op in ops
            for a in (self.expert_parts(op, s, None) if s % 2 else (Action(s, op),))
        }


def colocated(
    wiring: ColocatedWiring, num_microbatches: int, *, overlap: bool = False, split_weights: bool = False, look_ahead: int = 4
) -> Schedule:
    """The lowered schedule of every pipeline stage's ranks.

    Args:
        wiring: layers, groups and parts.
        num_microbatches: micro-batches of one group (each rank has its share of every one).
        overlap: forward and backward of different micro-batches take turns; not with a2a_chunks > 1.
        split_weights: the experts' weight gradients run after their input gradients have been sent.
        look_ahead: receives posted ahead of their wait, in messages (without that a transport's control traffic queues
            behind bulk data; measured +35 % on sockets).

    Raises:
        ConfigError: overlap together with chunked all-to-alls.
    """
    check_counts(num_microbatches=num_microbatches)
    if overlap and wiring.a2a_chunks > 1:
        raise ConfigError(f"a2a_chunks={wiring.a2a_chunks} with overlap=True: choose one way to hide the transfers")
    p, v = wiring.num_groups, wiring.num_chunks
    lists = {}
    for r in range(p):
        order = interleaved_order(r, p, v, num_microbatches, p)
        blocks = [_Block(wiring, op, (c * p + r) * wiring.layers_per_chunk, m, split_weights).actions for op, c, m in order]
        flags = [op for op, _, _ in order]
        body = _in_turns(flags, blocks) if overlap else [a for block in blocks for a in block]
        lists[str(r)] = tuple(_post_ahead(body, look_ahead))
    return Schedule(lists, num_microbatches, lowered=True)


class _Block:
    """One direction of one chunk of layers on one micro-batch."""

    def __init__(self, wiring: ColocatedWiring, op: Op, first: int, microbatch: int, split: bool) -> None:
        self.w, self.m, self.split = wiring, microbatch, split
        layers = range(first, first + wiring.layers_per_chunk)
        self.actions: list[Action] = []
        for layer in layers if op is Op.FORWARD else reversed(layers):
            (self._forward if op is Op.FORWARD else self._backward)(layer)

    def _all(self, op: Op, stage: int, kind: str) -> list[Action]:
        return [Action(stage, op, self.m, edge) for edge in self.w.parts(kind)]

    def _forward(self, layer: int) -> None:
        s, m, w = 2 * layer, self.m, self.w
        if w.crosses(layer - 1):
            self.actions.append(Action(s, Op.WAIT_F, m, "act"))
        self.actions += [Action(s, Op.FORWARD, m), *self._all(Op.SEND_F, s, "dispatch")]
        for part in w.expert_parts(Op.FORWARD, s + 1, m):
            self.actions += [*(b for b in w.before(part) if b.op in MESSAGE), part, *w.after(part)]
        self.actions += self._all(Op.WAIT_F, s, "combine")
        if w.crosses(layer):
            self.actions.append(Action(s, Op.SEND_F, m, "act"))
        if layer == w.num_layers - 1:
            self.actions += [Action(s + 2, Op.FORWARD, m)]

    def _backward(self, layer: int) -> None:
        s, m, w = 2 * layer, self.m, self.w
        if layer == w.num_layers - 1:
            self.actions.append(Action(s + 2, Op.BACKWARD, m))
        if w.crosses(layer):
            self.actions.append(Action(s, Op.WAIT_B, m, "d_act"))
        self.actions += self._all(Op.SEND_B, s, "d_combine")
        for part in w.expert_parts(Op.BACKWARD_INPUT if self.split else Op.BACKWARD, s + 1, m):
            self.actions += [*(b for b in w.before(part) if b.op in MESSAGE), part, *w.after(part)]
            if self.split:
                self.actions.append(part._replace(op=Op.BACKWARD_WEIGHT))
        self.actions += [*self._all(Op.WAIT_B, s, "d_dispatch"), Action(s, Op.BACKWARD, m)]
        if w.crosses(layer - 1):
            self.actions.append(Action(s, Op.SEND_B, m, "d_act"))


def _in_turns(ops: list[Op], blocks: list[list[Action]]) -> list[Action]:
    """Each backward runs together with the forward after the one it is paired with, segment by segment.

    A segment begins with a wait, so that its transfer was under way during the other block's segment. A backward never needs the
    forward it is merged with: that one belongs to a later micro-batch.
    """
    forwards = [b for op, b in zip(ops, blocks, strict=True) if op is Op.FORWARD]
    backwards = [b for op, b in zip(ops, blocks, strict=True) if op is not Op.FORWARD]
    warm = ops.index(Op.BACKWARD) if Op.BACKWARD in ops else len(ops)
    out = [a for block in forwards[:warm] for a in block]
    later: list[list[Action]] = forwards[warm:]
    for i, backward in enumerate(backwards):
        out += _merge(backward, later[i] if i < len(later) else [])
    return out


def _merge(first: list[Action], second: list[Action]) -> list[Action]:
    a, b = _segments(first), _segments(second)
    out: list[Action] = []
    for i in range(max(len(a), len(b))):
        out += [*(a[i] if i < len(a) else ()), *(b[i] if i < len(b) else ())]
    return out


def _segments(actions: list[Action]) -> list[list[Action]]:
    out: list[list[Action]] = []
    waits = (Op.WAIT_F, Op.WAIT_B)
    for i, a in enumerate(actions):
        if not out or (a.op in waits and actions[i - 1].op not in waits):
            out.append([])
        out[-1].append(a)
    return out


def _post_ahead(body: list[Action], look_ahead: int) -> list[Action]:
    """Post every receive ``look_ahead`` waits before its own."""
    waits = [a for a in body if a.op in (Op.WAIT_F, Op.WAIT_B)]
    posts = [a._replace(op=Op.RECV_F if a.op is Op.WAIT_F else Op.RECV_B) for a in waits]
    out, posted, seen = posts[:look_ahead], min(look_ahead, len(posts)), 0
    for a in body:
        if a.op in (Op.WAIT_F, Op.WAIT_B):
            upto = min(seen + look_ahead + 1, len(posts))
            out += posts[posted:upto]
            posted, seen = max(posted, upto), seen + 1
        out.append(a)
    return out
