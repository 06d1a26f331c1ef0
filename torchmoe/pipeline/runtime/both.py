"""An F rank that also has the head: expert units are its own, the head is what an attention rank would do."""

from __future__ import annotations

from typing import Any

from torchmoe.comm.m2n import Key, M2NExchange, Pending
from torchmoe.pipeline.action import Action
from torchmoe.pipeline.runtime.attention import AttentionRole
from torchmoe.pipeline.runtime.experts import ExpertRole
from torchmoe.pipeline.runtime.role import Batch, key_of, run_hook
from torchmoe.pipeline.runtime.stage import Stages

__all__ = ["ExpertsAndHeadRole"]

_EXPERTS_SEND = ("combine", "d_dispatch")
_EXPERTS_RECEIVE = ("counts", "dispatch", "d_combine")


class ExpertsAndHeadRole:
    """Runs F, I and W of expert units, F and B of the head."""

    def __init__(self, stages: Stages, exchange: M2NExchange) -> None:
        self._stages = stages
        self._experts, self._head = ExpertRole(stages, exchange), AttentionRole(stages, exchange)

    def key(self, action: Action) -> Key:
        return key_of(action)

    def shard(self, action: Action) -> None:
        run_hook(self._stages, action)

    def begin(self, batch: Batch) -> None:
        self._experts.begin(batch)
        self._head.begin(batch)

    def left(self) -> list[Key]:
        return [*self._experts.left(), *self._head.left()]

    def compute(self, action: Action, key: Key) -> None:
        (self._experts if action.stage % 2 else self._head).compute(action, key)

    def send(self, edge: str, key: Key) -> Pending[None]:
        return (self._experts if edge in _EXPERTS_SEND else self._head).send(edge, key)

    def post(self, edge: str, key: Key) -> Pending[Any]:
        # a combine is sent by the experts and received by the head
        return (self._experts if edge in _EXPERTS_RECEIVE else self._head).post(edge, key)

    def receive(self, edge: str, key: Key, value: Any) -> None:
        (self._experts if edge in _EXPERTS_RECEIVE else self._head).receive(edge, key, value)
