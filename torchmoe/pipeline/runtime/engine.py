"""The engine: executes one list of actions with one role, on one thread, in exactly that order.

It knows neither models nor placements. Only transport progress is concurrent: two threads in backward over shared parameters
would race. A benchmark that replaces compute by waiting gives it another role and shares everything else.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

from torchmoe.comm.m2n import Key, Pending
from torchmoe.errors import ScheduleError
from torchmoe.pipeline.action import Action, Op
from torchmoe.pipeline.runtime.recorder import Recorder
from torchmoe.pipeline.runtime.role import Role

__all__ = ["Engine"]

SHARDING = (Op.UNSHARD, Op.RESHARD, Op.REDUCE_GRAD)


class Engine:
    """Runs action lists; keeps the messages in flight.

    Args:
        role: computes units and makes the two halves of their messages.
        recorder: if given, what was done when is written there.
    """

    def __init__(self, role: Role, recorder: Recorder | None = None) -> None:
        self._role, self._recorder = role, recorder
        self._pending: dict[tuple[str, Key], Pending[Any]] = {}
        self._sends: list[tuple[Action, Pending[None]]] = []

    def run(self, actions: Sequence[Action]) -> None:
        """Execute a lowered list; returns when every message of it has ended.

        Raises:
            ScheduleError: a wait without its receive, or work left over at the end.
            ExchangeError: a message was missing, late or wrong. Nothing may be run after it.
        """
        self._pending.clear()
        self._sends.clear()
        if self._recorder:
            self._recorder.clear()
        for action in actions:
            self._act(action)
            self._poll_sends()
        for action, pending in self._sends:
            pending.wait()
            self._record(action, pending, "send")
        self._sends.clear()
        left = [*self._pending, *self._role.left()]
        if left:
            raise ScheduleError(
                f"the schedule ended with {len(left)} units or receives left over, first {left[0]}; verify() it first"
            )

    def _act(self, action: Action) -> None:
        if action.op in SHARDING:
            self._role.shard(action)
        elif action.edge is None:
            with self._span(action, "compute"):
                self._role.compute(action, self._role.key(action))
        elif action.op in (Op.SEND_F, Op.SEND_B):
            send = self._role.send(action.edge, self._role.key(action))
            self._posted(send)
            self._sends.append((action, send))
        elif action.op in (Op.RECV_F, Op.RECV_B):
            key = self._role.key(action)
            self._pending[action.edge, key] = receive = self._role.post(action.edge, key)
            self._posted(receive)
        else:
            key = self._role.key(action)
            pending = self._pending.pop((action.edge, key), None)
            if pending is None:
                raise ScheduleError(f"{action}: its receive was never posted; verify() the schedule first")
            with self._span(action, "wait"):
                value = pending.wait()
            self._record(action, pending, "recv")
            self._role.receive(action.edge, key, value)

    def _poll_sends(self) -> None:
        """Free the buffers of finished sends, in whatever order they finish."""
        open_sends = []
        for action, pending in self._sends:
            if pending.done():
                pending.wait()
                self._record(action, pending, "send")
            else:
                open_sends.append((action, pending))
        self._sends = open_sends

    def _span(self, action: Action, kind: Literal["compute", "wait"]) -> AbstractContextManager[None]:
        return self._recorder.span(action, kind) if self._recorder else nullcontext()

    def _posted(self, pending: Pending[Any]) -> None:
        if self._recorder:
            self._recorder.posted(pending)

    def _record(self, action: Action, pending: Pending[Any], kind: Literal["send", "recv"]) -> None:
        if self._recorder:
            self._recorder.message(action, pending, kind)
