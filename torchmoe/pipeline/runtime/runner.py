"""The runner: training and validation steps of one rank, by a lowered schedule.

It knows the exchange and the stage contract and nothing of models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchmoe.comm.m2n import M2NExchange
from torchmoe.comm.route import SequenceMap
from torchmoe.errors import ConfigError, ScheduleError
from torchmoe.pipeline.action import Schedule
from torchmoe.pipeline.runtime.attention import AttentionRole
from torchmoe.pipeline.runtime.both import ExpertsAndHeadRole
from torchmoe.pipeline.runtime.engine import Engine
from torchmoe.pipeline.runtime.experts import ExpertRole
from torchmoe.pipeline.runtime.recorder import Recorder
from torchmoe.pipeline.runtime.ride import RideExperts
from torchmoe.pipeline.runtime.role import Batch
from torchmoe.pipeline.runtime.stage import MicroBatch, Stages
from torchmoe.pipeline.trace import Event
from torchmoe.placement import Placement

__all__ = ["Runner"]


class Runner:
    """Runs the steps of one rank. Call :meth:`step` on every rank with the same number of micro-batches.

    Args:
        placement: the layout; this rank's part of it is ``exchange.where``.
        schedule: a lowered schedule with one list per group.
        stages: the parts of the model on this rank.
        exchange: this rank's ends of the exchange.
        eval_schedule: a lowered forward-only schedule for :meth:`eval`.
        trace: record what was done when, see :attr:`events`.

    Raises:
        ConfigError: a stage of this rank's group is missing.
        ScheduleError: the schedule is not lowered or lacks this rank's group.
    """

    def __init__(
        self,
        placement: Placement,
        schedule: Schedule,
        *,
        stages: Stages,
        exchange: M2NExchange,
        eval_schedule: Schedule | None = None,
        trace: bool = False,
    ) -> None:
        self.placement, self.stages, self.exchange = placement, stages, exchange
        self.where = exchange.where
        self.schedule, self.eval_schedule = schedule, eval_schedule
        for s in (schedule, eval_schedule):
            if s is not None:
                self._check_schedule(s)
        self._check_stages()
        self._recorder = Recorder(exchange.transport.rank, str(self.where.group)) if trace else None
        self._role = self._make_role()
        self._engine = Engine(self._role, self._recorder)
        self.aux_loss: Tensor | None = None
        """Sum of the balancing losses of this rank's layers in the last step, already scaled; None without any."""

    @property
    def events(self) -> list[Event]:
        """What the last step did, in seconds of this host's monotonic clock; empty unless tracing."""
        return self._recorder.events if self._recorder else []

    def step(
        self,
        *,
        arg_mbs: Sequence[tuple[Any, ...]] | None = None,
        kwarg_mbs: Sequence[Mapping[str, Any]] | None = None,
        target_mbs: Sequence[Any] | None = None,
        losses: list[Tensor] | None = None,
        loss_kwargs: Mapping[str, Any] | None = None,
        return_outputs: bool = False,
        lengths: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """One forward and backward over all micro-batches; gradients accumulate, they are not summed over ranks here.

        The signature is torchtitan's. F ranks need not pass anything, but for ``lengths`` where they have the head; labels
        then come from ``target_mbs`` of the last layer's attention ranks.

        Args:
            arg_mbs: per micro-batch, this rank's inputs: tokens [sequences, length] first.
            kwarg_mbs: per micro-batch, keyword inputs of the attention stages.
            target_mbs: per micro-batch, labels.
            losses: extended in place by one detached loss per micro-batch, on the ranks that have the head.
            loss_kwargs: handed to the head with every micro-batch.
            return_outputs: must be False; logits are not kept.
            lengths: per micro-batch, tokens of every sequence of the global micro-batch. Attention ranks need it unless all
                sequences have one length and every attention rank has as many.

        Raises:
            ConfigError: another number of micro-batches than the schedule's, or inputs that do not fit the lengths.
            ExchangeError: a message was missing, late or wrong; the runner cannot be used again.
        """
        batch = self._batch(self.schedule, arg_mbs, kwarg_mbs, target_mbs, loss_kwargs, return_outputs, lengths)
        self._run(self.schedule, batch, losses)

    def eval(
        self,
        *,
        arg_mbs: Sequence[tuple[Any, ...]] | None = None,
        kwarg_mbs: Sequence[Mapping[str, Any]] | None = None,
        target_mbs: Sequence[Any] | None = None,
        losses: list[Tensor] | None = None,
        loss_kwargs: Mapping[str, Any] | None = None,
        return_outputs: bool = False,
        lengths: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """Forward only, by ``eval_schedule``. Arguments and errors of :meth:`step`."""
        if self.eval_schedule is None:
            raise ConfigError("eval() needs a forward-only schedule; pass eval_schedule= to the runner")
        batch = self._batch(self.eval_schedule, arg_mbs, kwarg_mbs, target_mbs, loss_kwargs, return_outputs, lengths)
        with torch.no_grad():
            self._run(self.eval_schedule, batch, losses)

    def _make_role(self) -> AttentionRole | ExpertRole | ExpertsAndHeadRole:
        if self.where.role == "attention":
            return AttentionRole(self.stages, self.exchange)
        has_head = self.where.group == self.placement.head_group
        return (ExpertsAndHeadRole if has_head else ExpertRole)(self.stages, self.exchange)

    # ---- inputs
    def _check_schedule(self, schedule: Schedule) -> None:
        if not schedule.lowered:
            raise ScheduleError("the runner needs explicit messages but the schedule has none; pass it through lower() first")
        if str(self.where.group) not in schedule.lists:
            raise ScheduleError(
                f"the schedule has lists for {', '.join(schedule.lists)} but rank {self.exchange.transport.rank} is in "
                f"{self.where.group}; build it from the same placement"
            )

    def _check_stages(self) -> None:
        head = 2 * self.placement.num_layers
        for unit in self.placement.stages(self.where.group):
            layer = unit // 2
            have: dict[str, bool] = {"embedding": unit != 0 or self.stages.embedding is not None}
            if unit == head:
                have["head"] = self.stages.head is not None
            elif unit % 2:
                have[f"experts[{layer}]"] = layer in self.stages.experts
                self._check_ride(layer)
            else:
                have[f"attention[{layer}]"] = layer in self.stages.attention
            missing = [name for name, there in have.items() if not there]
            if missing:
                rank = self.exchange.transport.rank
                raise ConfigError(f"rank {rank} in {self.where.group} has no stage {missing[0]}; add it to its Stages")

    def _check_ride(self, layer: int) -> None:
        stage, ride = self.stages.experts.get(layer), self.exchange.residual == "ride"
        if stage is not None and isinstance(stage, RideExperts) != ride:
            raise ConfigError(
                f"experts[{layer}] is a {type(stage).__name__} but residual={self.exchange.residual!r}; "
                "wrap expert stages in RideExperts with residual='ride', and only then"
            )

    def _batch(
        self,
        schedule: Schedule,
        arg_mbs: Sequence[tuple[Any, ...]] | None,
        kwarg_mbs: Sequence[Mapping[str, Any]] | None,
        target_mbs: Sequence[Any] | None,
        loss_kwargs: Mapping[str, Any] | None,
        return_outputs: bool,
        lengths: Sequence[Sequence[int]] | None,
    ) -> Batch:
        if return_outputs:
            raise ConfigError("return_outputs=True: the logits of a step are never kept; compute what you need in the head stage")
        n = schedule.num_microbatches
        train = not schedule.forward_only
        given = {"arg_mbs": arg_mbs, "kwarg_mbs": kwarg_mbs, "target_mbs": target_mbs, "lengths": lengths}
        for name, value in given.items():
            if value is not None and len(value) != n:
                raise ConfigError(
                    f"{name} has {len(value)} micro-batches, the schedule has {n}; build the schedule for that many"
                )
        if self.where.role == "ffn" and self.where.group != self.placement.head_group:
            return Batch([], [], train=train)
        mbs = [
            MicroBatch(
                index=m,
                lengths=tuple(lengths[m]) if lengths is not None else self._equal_lengths(arg_mbs[m][0] if arg_mbs else None),
                inputs=tuple(arg_mbs[m]) if arg_mbs else (),
                kwargs=kwarg_mbs[m] if kwarg_mbs else {},
                target=target_mbs[m] if target_mbs else None,
                loss_kwargs=loss_kwargs or {},
            )
            for m in range(n)
        ]
        return Batch(mbs, [SequenceMap(self.placement, mb.lengths) for mb in mbs], train=train)

    def _equal_lengths(self, tokens: Any) -> tuple[int, ...]:
        sizes = self.placement.attention
        if not isinstance(tokens, Tensor) or tokens.dim() != 2 or len(set(sizes)) > 1:
            raise ConfigError(
                f"the sequences of a micro-batch are unknown (attention={list(sizes)}, first input not [sequences, length] or "
                "groups of unequal size, or an F rank that has the head); pass lengths= to step()"
            )
        mine, length = tokens.shape
        return (length,) * (mine * sizes[0] * self.placement.replicas)

    # ---- the step
    def _run(self, schedule: Schedule, batch: Batch, losses: list[Tensor] | None) -> None:
        self._role.begin(batch)
        self._engine.run(schedule.lists[str(self.where.group)])
        self.exchange.settle()
        self.aux_loss = batch.aux_loss
        if losses is not None:
            losses.extend(batch.losses)
