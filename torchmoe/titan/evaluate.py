"""The held-out loss of a trained checkpoint, and what it owes to the experts and to attention."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from torchmoe.titan.expert_part import LocalExperts

__all__ = ["experts_zeroed", "held_out_batches", "own_token_attention"]


@contextmanager
def experts_zeroed(parts: Sequence[nn.Module]) -> Iterator[None]:
    """Inside, the routed experts of these parts return zero: their last projection is zero. Restored afterwards."""
    saved = []
    with torch.no_grad():
        for part in parts:
            for module in part.modules():
                if isinstance(module, LocalExperts):
                    for name in module.family.last:
                        parameter = getattr(module, name)
                        saved.append((parameter, parameter.detach().clone()))
                        parameter.zero_()
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, value in saved:
                parameter.copy_(value)


def _own_token(q_BLNH: Tensor, k_BLNH: Tensor, v_BLNH: Tensor, **kwargs: Any) -> Tensor:
    """Attention in which every token sees itself alone: its output is its own value."""
    return v_BLNH.repeat_interleave(q_BLNH.shape[2] // v_BLNH.shape[2], dim=2)


@contextmanager
def own_token_attention(parts: Sequence[nn.Module]) -> Iterator[None]:
    """Inside, every token attends to itself only."""
    with ExitStack() as stack:
        for part in parts:
            for module in part.modules():
                inner = getattr(module, "inner_attention", None)
                if isinstance(inner, nn.Module):
                    stack.enter_context(mock.patch.object(inner, "forward", _own_token))
        yield


def held_out_batches(trainer: Any, count: int) -> list[Any]:
    """``count`` global micro-batches of the held-out text on attention ranks (a fixed sample), placeholders
    on FFN ranks. Fewer if the text is short: still a multiple of a step's micro-batches; the text repeats if it is shorter.
    """
    from torchmoe.titan.data import TextDataLoader

    step = trainer.num_pipeline_parallel_microbatches
    count = max(step, count // step * step)
    if not trainer.is_attention:
        return [None] * count
    batch = trainer.config.parallelism.pipeline_parallel_microbatch_size
    config = TextDataLoader.Config(folder=trainer.config.dataloader.folder, split="held_out")
    loader = config.build(
        dp_world_size=1,
        dp_rank=0,
        tokenizer=trainer.tokenizer,
        seq_len=trainer.config.training.seq_len,
        local_batch_size=batch,
    )
    source = iter(loader)
    return [next(source) for _ in range(count)]
