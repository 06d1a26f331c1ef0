"""torchtitan's validation, by the forward-only schedule of a disaggregated run."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchtitan.components.validate import BaseValidator, Validator

from torchmoe.errors import ConfigError

__all__ = ["DisagValidator"]


class DisagValidator(BaseValidator):
    """Validates a DisagTrainer as ``config`` says: its ``freq``, ``steps`` (of a training step's size each) and ``dataloader``.

    Every attention rank reads the same loader; FFN ranks read nothing. ``loss`` is that of the last validation, on every rank.
    """

    def __init__(self, config: Validator.Config, *, trainer: Any) -> None:
        super().__init__(config)
        self.trainer = trainer
        self.loss: float | None = None

    def validate(self, model_parts: list[nn.Module], step: int) -> None:
        """Log the mean loss per token over ``steps`` steps, or over all whole steps of the data (-1).

        Raises:
            ConfigError: the data has not one whole step.
            PeerLost: another rank died, froze or failed.
        """
        trainer, steps = self.trainer, self.config.steps
        batches = self._batches()
        total = torch.zeros(2, dtype=torch.float64)
        done = 0
        with trainer.roles.naming_the_lost(f"validation after step {step}"), trainer.evaluating():
            while steps == -1 or done < steps:
                group = self._next_step(batches)
                if group is None:
                    break
                total += trainer.evaluate_step(group)
                done += 1
            if not done:
                raise ConfigError(
                    f"the validation data has not the {trainer.config.training.local_batch_size} sequences of one step; "
                    "give validator.dataloader more data"
                )
            self.loss = trainer.mean_loss(total)
        trainer.metrics_processor.log_validation(loss=self.loss, step=step)

    def _batches(self) -> Iterator[Any]:
        trainer = self.trainer
        if not trainer.is_attention:
            return iter(())
        loader = dataclasses.replace(self.config.dataloader, infinite=self.config.steps != -1)
        config = trainer.config
        return iter(
            loader.build(
                dp_world_size=1,
                dp_rank=0,
                tokenizer=trainer.tokenizer,
                seq_len=config.training.seq_len,
                local_batch_size=config.parallelism.pipeline_parallel_microbatch_size,
            )
        )

    def _next_step(self, batches: Iterator[Any]) -> list[Any] | None:
        """The micro-batches of one more step (none on FFN ranks); None on every rank where a loader has no more."""
        trainer = self.trainer
        group: list[Any] = []
        enough = True
        for _ in range(trainer.num_pipeline_parallel_microbatches if trainer.is_attention else 0):
            batch = next(batches, None)
            if batch is None:
                enough = False
                break
            trainer.metrics_processor.ntokens_since_last_log += batch[1].numel()
            group.append(batch)
        left = torch.tensor(int(enough), device=trainer.device)
        dist.all_reduce(left, op=dist.ReduceOp.MIN)
        return group if left else None
