"""An F rank's units: the routed experts of its layers, with the explicit split backward, and their messages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor

from torchmoe.comm.m2n import Key, M2NExchange, Pending
from torchmoe.comm.route import ReceivedRoute
from torchmoe.pipeline.action import Action, Op
from torchmoe.pipeline.runtime.role import Batch, key_of, run_hook, unknown_edge, unknown_op
from torchmoe.pipeline.runtime.stage import ExpertStage, RidingExpertStage, Stages, WeightWork

__all__ = ["ExpertRole"]


@dataclass
class _Unit:
    """Layer l of one micro-batch: lives from its counts to its weight gradients."""

    received: ReceivedRoute
    rows: tuple[Tensor, Tensor, Tensor] | None = None
    saved: Any = None
    y_RD: Tensor | None = None
    dy_RD: Tensor | None = None
    dx_RD: Tensor | None = None
    dgates_RK: Tensor | None = None
    work: WeightWork | None = None


class ExpertRole:
    """Runs F, I and W of expert units."""

    def __init__(self, stages: Stages, exchange: M2NExchange) -> None:
        self._stages, self._exchange = stages, exchange
        self._train = True
        self._units: dict[Key, _Unit] = {}

    def key(self, action: Action) -> Key:
        return key_of(action)

    def shard(self, action: Action) -> None:
        run_hook(self._stages, action)

    def begin(self, batch: Batch) -> None:
        self._train = batch.train
        self._units.clear()

    def left(self) -> list[Key]:
        return list(self._units)

    def compute(self, action: Action, key: Key) -> None:
        unit, stage = self._units[key], self._stages.experts[key.layer]
        if action.op is Op.FORWARD:
            assert unit.rows is not None
            if self._exchange.residual == "ride":
                primary_R = self._exchange.primary(key, unit.received, unit.rows[1])
                unit.y_RD, saved = cast(RidingExpertStage, stage).forward_saved(*unit.rows, primary_R)
            else:
                unit.y_RD, saved = cast(ExpertStage, stage).forward_saved(*unit.rows)
            unit.rows = None
            unit.saved = saved if self._train else None
        elif action.op is Op.BACKWARD_INPUT:
            assert unit.dy_RD is not None
            unit.dx_RD, unit.dgates_RK, unit.work = stage.backward_input(unit.saved, unit.dy_RD)
            unit.saved = unit.dy_RD = None
        elif action.op is Op.BACKWARD_WEIGHT:
            assert unit.work is not None
            unit.work.run()
            del self._units[key]
        else:
            raise unknown_op(action, (Op.FORWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT))

    def send(self, edge: str, key: Key) -> Pending[None]:
        unit = self._units[key]
        if edge == "combine":
            assert unit.y_RD is not None
            pending = self._exchange.send_combine(key, unit.received, unit.y_RD)
            unit.y_RD = None
            if not self._train:
                del self._units[key]
            return pending
        if edge == "d_dispatch":
            assert unit.dx_RD is not None and unit.dgates_RK is not None
            pending = self._exchange.send_d_dispatch(key, unit.received, unit.dx_RD, unit.dgates_RK)
            unit.dx_RD = unit.dgates_RK = None
            return pending
        raise unknown_edge("F", edge, key, "send")

    def post(self, edge: str, key: Key) -> Pending[Any]:
        if edge == "counts":
            return self._exchange.post_counts(key)
        if edge == "dispatch":
            if key not in self._units:  # fixed sizes: lowered without counts, nothing to wait for
                self.receive("counts", key, self._exchange.post_counts(key).wait())
            return self._exchange.post_dispatch(key, self._units[key].received)
        if edge == "d_combine":
            return self._exchange.post_d_combine(key, self._units[key].received)
        raise unknown_edge("F", edge, key, "receive")

    def receive(self, edge: str, key: Key, value: Any) -> None:
        if edge == "counts":
            self._units[key] = _Unit(value)
        elif edge == "dispatch":
            self._units[key].rows = value
        elif edge == "d_combine":
            self._units[key].dy_RD = value
        else:
            raise unknown_edge("F", edge, key, "receive")
