"""A torchtitan recipe as a disaggregated one."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention, VarlenAttention
from torchtitan.models.gpt_oss.model import Attention as GptOssAttention
from torchtitan.trainer import Trainer

from torchmoe.errors import ConfigError
from torchmoe.titan.check import DEGREES
from torchmoe.titan.options import DisagConfig
from torchmoe.titan.shims import spmd_backend
from torchmoe.titan.trainer import DisagTrainer, split_pipeline

__all__ = ["disaggregate"]


def disaggregate(config: Trainer.Config, disag: DisagConfig) -> DisagTrainer.Config:
    """The same training with attention and experts on different ranks. ``config`` is not changed.

    Parallel degrees become 1 (the groups come from ``disag``) and CUDA graphs are off. On a host without an accelerator the
    attention is torch's causal kernel, because FlexAttention and varlen attention have no backward there; it does not mask
    packed documents apart.

    Args:
        config: a torchtitan recipe, e.g. ``deepseek_v3_debugmodel()``. ``training.local_batch_size`` now counts the sequences
            of a step of the whole run, ``parallelism.pipeline_parallel_microbatch_size`` those of one micro-batch.
        disag: group sizes and options.

    Raises:
        ConfigError: a model without a spec, or one whose attention cannot run on this host.
    """
    if config.model_spec is None:
        raise ConfigError("the recipe has no model_spec; set it, e.g. by a model_registry of torchtitan")
    model = copy.deepcopy(config.model_spec.model)
    if not torch.accelerator.is_available():
        _attend_on_cpu(model)
    fields: dict[str, Any] = {f.name: getattr(config, f.name) for f in dataclasses.fields(Trainer.Config)}
    fields["model_spec"] = dataclasses.replace(config.model_spec, model=model, pipelining_fn=split_pipeline)
    fields["training"] = dataclasses.replace(config.training, disable_cuda_graphs=True)
    fields["parallelism"] = dataclasses.replace(
        config.parallelism, spmd_backend=spmd_backend(), data_parallel_shard_degree=-1, **dict.fromkeys(DEGREES, 1)
    )
    return DisagTrainer.Config(**fields, disag=disag)


def _attend_on_cpu(model: Any) -> None:
    for i, layer in enumerate(model.layers):
        attention = layer.attention
        if not isinstance(getattr(attention, "inner_attention", None), (FlexAttention.Config, VarlenAttention.Config)):
            continue
        if isinstance(attention, GptOssAttention.Config):
            raise ConfigError(
                f"layers.{i}: GPT-OSS's attention has sinks and windows, which torch's causal kernel has not; run it on a GPU, "
                "or give it an inner_attention that runs here"
            )
        attention.inner_attention = ScaledDotProductAttention.Config()
