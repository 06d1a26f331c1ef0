"""What the runner needs of a rank's role: compute one unit, start and take in its messages."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from torchmoe.comm.m2n import Key, Pending
from torchmoe.comm.route import SequenceMap
from torchmoe.errors import ScheduleError
from torchmoe.pipeline.action import Action, Op
from torchmoe.pipeline.runtime.stage import MicroBatch

__all__ = ["Batch", "Role", "unknown_edge", "unknown_op"]


class Batch:
    """The micro-batches of one step and what comes out of it."""

    def __init__(self, mbs: list[MicroBatch], seqs: list[SequenceMap], *, train: bool) -> None:
        self.mbs, self.seqs, self.train = mbs, seqs, train
        self.losses: list[Tensor] = []
        self.aux_loss: Tensor | None = None


class Role(Protocol):
    """One rank's units and their state between actions. ``key`` is the MoE layer of a unit or message, and the micro-batch."""

    def begin(self, batch: Batch) -> None: ...

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
