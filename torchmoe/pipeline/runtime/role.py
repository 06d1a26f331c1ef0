"""What the runner needs of a rank's role: compute one unit, start and take in its messages."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from torchmoe.comm.m2n import Key, Pending
from torchmoe.comm.route import SequenceMap
from torchmoe.errors import ScheduleError
from torchmoe.pipeline.action import Action, Op
from torchmoe.pipeline.lower import message_layer
from torchmoe.pipeline.runtime.stage import MicroBatch, Stages

__all__ = ["Batch", "Role", "key_of", "run_hook", "unknown_edge", "unknown_op"]


class Batch:
    """The micro-batches of one step and what comes out of it."""

    def __init__(self, mbs: list[MicroBatch], seqs: list[SequenceMap], *, train: bool) -> None:
        self.mbs, self.seqs, self.train = mbs, seqs, train
        self.losses: list[Tensor] = []
        self.aux_loss: Tensor | None = None


class Role(Protocol):
    """One rank's units and their state between actions. ``key`` is the MoE layer of a unit or message, and the micro-batch."""

    def key(self, action: Action) -> Key:
        """Which unit an action or message belongs to."""

    def shard(self, action: Action) -> None:
        """UNSHARD, RESHARD or REDUCE_GRAD of a unit."""

    def compute(self, action: Action, key: Key) -> None: ...

    def send(self, edge: str, key: Key) -> Pending[None]: ...

    def post(self, edge: str, key: Key) -> Pending[Any]: ...

    def receive(self, edge: str, key: Key, value: Any) -> None: ...

    def left(self) -> list[Key]:
        """Units whose state is still held; none after a complete step."""


def unknown_edge(role: str, edge: str, key: Key, op: str) -> ScheduleError:
    return ScheduleError(
        f"{role} ranks cannot {op} {edge!r} (layer {key.layer}, micro-batch {key.microbatch}); verify() the schedule first"
    )


def unknown_op(action: Action, ops: tuple[Op, ...]) -> ScheduleError:
    return ScheduleError(
        f"{action}: unit {action.stage} runs {', '.join(o.value for o in ops)} only; verify() the schedule first"
    )


def run_hook(stages: Stages, action: Action) -> None:
    """Run the stages' hook for UNSHARD, RESHARD or REDUCE_GRAD."""
    hook = stages.hooks.get(action.op)
    if hook is None:
        raise ScheduleError(f"{action}: this rank has no hook for {action.op}; add one to Stages.hooks")
    hook(action.stage)


def key_of(action: Action) -> Key:
    """MoE layer and micro-batch of an action of an A/F schedule; a message belongs to the layer that dispatched."""
    if action.microbatch is None:
        raise ScheduleError(f"{action} names no micro-batch; write e.g. {action.stage}{action.op}0")
    return Key(action.stage // 2 if action.edge is None else message_layer(action), action.microbatch)
