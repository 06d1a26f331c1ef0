"""Refusals before anything is launched, and the check that a split block computes what the unsplit one does."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention, VarlenAttention

from torchmoe.errors import ConfigError
from torchmoe.experts import FusedExpertMLP, RankExperts
from torchmoe.placement import Placement
from torchmoe.titan.exact import exact_casts
from torchmoe.titan.options import exchange_plan, placement_of, schedules
from torchmoe.titan.split import attention_half, refuse_head

__all__ = ["check_block", "check_config", "check_model"]

TOLERANCE = 1e-4
_EXPERTS = 8


def _small(config: Any) -> Any:
    """A copy of a block's config that can be built here: few experts, an attention that runs anywhere."""
    config = copy.deepcopy(config)
    inner = getattr(config.attention, "inner_attention", None)
    if isinstance(inner, (FlexAttention.Config, VarlenAttention.Config)):
        config.attention.inner_attention = ScaledDotProductAttention.Config()
    moe = config.moe
    experts = max(_EXPERTS, 2 * moe.router.top_k)
    if moe.num_experts > experts and moe.router.num_expert_groups is None:
        moe.num_experts = moe.router.num_experts = moe.router.gate.out_features = experts
        moe.routed_experts.inner_experts.num_experts = moe.routed_experts.token_dispatcher.num_experts = experts
    return config


def _fill(block: Any, generator: torch.Generator) -> None:
    """Weights of a size at which every part of the block shows in its output."""
    for parameter in block.parameters():
        if parameter.dim() == 1:
            parameter.copy_(1 + 0.1 * torch.randn(parameter.shape, generator=generator))
        else:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5)
    bias = block.moe.expert_bias_E
    if bias is not None:
        bias.copy_(0.05 * torch.randn(bias.shape, generator=generator))


def _joined(block: Any, x_TD: Tensor, lengths: list[int], positions_TL: Tensor) -> Tensor:
    """The split block with its experts called directly."""
    res_TD, x_TD, ids_TK, gates_TK = attention_half(block, x_TD, lengths, None, positions_TL)
    inner = block.moe.routed_experts.inner_experts
    mlp = FusedExpertMLP.from_parameters(inner.w1_EFD, inner.w2_EDF, inner.w3_EFD, backend="reference")
    experts = RankExperts(mlp, range(inner.num_experts), inner.num_experts)
    y_TD, _ = experts.forward_saved(x_TD, ids_TK.int(), gates_TK)
    return res_TD + y_TD


@torch.no_grad()
def check_block(config: Any, name: str) -> None:
    """Build one MoE block from its config on the CPU and compare its own forward with the split one, on random weights.

    Args:
        config: a torchtitan TransformerBlock.Config with ``moe``.
        name: for the message.

    Raises:
        ConfigError: the two differ, or the block is not made of attention, norms and an MoE in the usual way.
    """
    try:
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            block = _small(config).build()
            block.init_states()
        generator = torch.Generator().manual_seed(0)
        _fill(block, generator)
        block.train()
        batch, length = 2, 6
        dim = block.moe.routed_experts.inner_experts.w1_EFD.shape[-1]
        x_BLD = torch.randn(batch, length, dim, generator=generator)
        positions = torch.arange(length).expand(batch, -1)
        with exact_casts(torch.float32):
            want = block(x_BLD, None, positions)
            got = _joined(block, x_BLD.reshape(-1, dim), [length] * batch, positions).view_as(want)
    except ConfigError:
        raise
    except Exception as e:
        kind = type(config).__qualname__.removesuffix(".Config")
        raise ConfigError(
            f"{name}: a block of {kind} cannot be split ({type(e).__name__}: {e}); the split needs attention, attention_norm, "
            "ffn_norm and an MoE with router, routed_experts and shared_experts"
        ) from e
    error = float((got - want).norm() / (want - x_BLD).norm())
    if not error < TOLERANCE:
        kind = type(block).__name__
        raise ConfigError(
            f"{name}: {kind} computes something else than h + attention(norm(h)) followed by the MoE: split and unsplit forward "
            f"differ by {error:.1e} (allowed {TOLERANCE:g}); use a block with this structure, or train it unsplit"
        )


def check_config(config: Any) -> Placement:
    """Refuse what a disaggregated run cannot do, before anything is launched. Returns the placement."""
    placement = placement_of(config)
    training, parallelism = config.training, config.parallelism
    batch, micro = training.local_batch_size, parallelism.pipeline_parallel_microbatch_size
    if batch % micro:
        raise ConfigError(
            f"training.local_batch_size={batch} (sequences of a step) is not a multiple of "
            f"parallelism.pipeline_parallel_microbatch_size={micro}; change one of them"
        )
    most = max(placement.attention) * placement.replicas
    if micro < most:
        raise ConfigError(
            f"a micro-batch of {micro} sequences over {most} attention ranks leaves some without any; raise "
            "parallelism.pipeline_parallel_microbatch_size, or use fewer attention ranks"
        )
    degrees = {
        name: getattr(parallelism, name)
        for name in (
            "data_parallel_replicate_degree",
            "tensor_parallel_degree",
            "context_parallel_degree",
            "pipeline_parallel_degree",
            "expert_parallel_degree",
        )
    }
    for name, degree in degrees.items():
        if degree != 1:
            raise ConfigError(f"parallelism.{name}={degree}: in a disaggregated run the groups come from disag; set it to 1")
    if config.compile.enable:
        raise ConfigError("compile.enable is not supported in a disaggregated run yet; switch it off")
    if config.validator.enable and not hasattr(config.validator.dataloader, "infinite"):
        raise ConfigError(
            f"validator.dataloader of {type(config.validator.dataloader).__qualname__} has no option 'infinite', by which "
            "validation says whether to stop at the end of the data; add it, or set validator.enable=False"
        )
    exchange_plan(config, placement)
    schedules(placement, config.disag, batch // micro)
    check_model(config.model_spec.model, placement)
    return placement


def check_model(model_config: Any, placement: Placement) -> None:
    """Refuse a model that cannot be split in this placement.

    Raises:
        ConfigError: a head that cannot be where it is wanted, or a block that computes something else than its split form.
    """
    moe = [i for i, layer in enumerate(model_config.layers) if getattr(layer, "moe", None) is not None]
    refuse_head(
        placement,
        tied=getattr(model_config, "enable_weight_tying", False),
        trailing=[f"layers.{i}" for i in range(moe[-1] + 1, len(model_config.layers))],
    )
    seen = set()
    for i, layer in enumerate(model_config.layers):
        if getattr(layer, "moe", None) is None:
            continue
        kind = (type(layer), type(layer.attention), type(layer.moe), layer.moe.shared_experts is None)
        if kind not in seen:
            seen.add(kind)
            check_block(layer, f"layers.{i}")
