"""Refusals before anything is launched, and the check that a split block computes what the unsplit one does."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch
from torch import Tensor
from torchtitan.components.loss import ChunkedLossWrapper
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention, VarlenAttention

from torchmoe.errors import ConfigError
from torchmoe.experts import RankExperts
from torchmoe.placement import Placement
from torchmoe.titan.exact import exact_casts
from torchmoe.titan.expert_part import family_of
from torchmoe.titan.options import exchange_plan, matching_groups, placement_of, schedules
from torchmoe.titan.split import attention_half, refuse_head

__all__ = ["DEGREES", "check_block", "check_config", "check_decoder", "check_model", "check_optimizer"]

TOLERANCE = 1e-4
DEGREES = (
    "data_parallel_replicate_degree",
    "tensor_parallel_degree",
    "context_parallel_degree",
    "pipeline_parallel_degree",
    "expert_parallel_degree",
)
_EXPERTS, _HIDDEN, _VOCAB = 8, 64, 64


def _small(config: Any) -> Any:
    """A copy of a block's config that can be built here: few experts, an attention that runs anywhere."""
    config = copy.deepcopy(config)
    inner = getattr(config.attention, "inner_attention", None)
    if isinstance(inner, (FlexAttention.Config, VarlenAttention.Config)):
        config.attention.inner_attention = ScaledDotProductAttention.Config()
    moe, router = config.moe, config.moe.router
    groups = router.num_expert_groups or 1
    # as many as routing needs to have a choice: twice its top-k, in groups of at least two
    experts = groups * max(2, -(-max(_EXPERTS, 2 * router.top_k) // groups))
    inner = moe.routed_experts.inner_experts
    if moe.num_experts > experts:
        moe.num_experts = router.num_experts = router.gate.out_features = experts
        inner.num_experts = moe.routed_experts.token_dispatcher.num_experts = experts
    inner.hidden_dim = min(inner.hidden_dim, _HIDDEN)
    return config


def _fill(block: Any, generator: torch.Generator) -> None:
    """Weights of a size at which every part of the block shows in its output."""
    _randomise(block, generator)
    bias = block.moe.expert_bias_E
    if bias is not None:
        bias.copy_(0.05 * torch.randn(bias.shape, generator=generator))


def _randomise(module: Any, generator: torch.Generator) -> None:
    for parameter in module.parameters():
        if parameter.dim() == 1:
            parameter.copy_(1 + 0.1 * torch.randn(parameter.shape, generator=generator))
        else:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5)


def _joined(block: Any, x_TD: Tensor, lengths: list[int], positions_TL: Tensor) -> Tensor:
    """The split block with its experts called directly."""
    res_TD, x_TD, ids_TK, gates_TK = attention_half(block, x_TD, lengths, None, positions_TL)
    inner = block.moe.routed_experts.inner_experts
    mlp = family_of(inner, "experts").mlp(inner, backend="reference")
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
        dim = block.moe.router.gate.weight.shape[-1]
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


@torch.no_grad()
def check_decoder(config: Any) -> None:
    """Build the decoder around its blocks on the CPU (without blocks, with a small vocabulary) and compare its forward with
    embedding, norm and head one after the other, which is what the stages run.

    Raises:
        ConfigError: it has other parts, or computes something else.
    """
    kind = type(config).__qualname__.removesuffix(".Config")
    if getattr(config, "mtp_layers", None):
        raise ConfigError(
            f"{kind} has {len(config.mtp_layers)} multi-token prediction layers, which no stage runs; leave them out"
        )
    small = copy.copy(config)
    small.layers = []
    small.vocab_size = _VOCAB
    small.tok_embeddings = dataclasses.replace(config.tok_embeddings, num_embeddings=_VOCAB)
    small.lm_head = dataclasses.replace(config.lm_head, out_features=_VOCAB)
    with torch.device("meta"):
        parts = {name for name, _ in small.build().named_children()} - {"tok_embeddings", "layers", "norm", "lm_head"}
    if parts:
        raise ConfigError(
            f"{kind} has {', '.join(sorted(parts))}, which no stage runs; use a model of embedding, blocks, norm and head"
        )
    try:
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            model = small.build()
            model.init_states()
        generator = torch.Generator().manual_seed(0)
        _randomise(model, generator)
        tokens = torch.randint(_VOCAB, (2, 6), generator=generator)
        want = model(tokens, positions=torch.arange(6).expand(2, -1))
        got = model.lm_head(model.norm(model.tok_embeddings(tokens)))
    except Exception as e:
        raise ConfigError(
            f"{kind} cannot be split ({type(e).__name__}: {e}); the split needs a decoder of embedding, blocks, norm and head"
        ) from e
    error = float((got - want).norm() / want.norm())
    if not error < TOLERANCE:
        raise ConfigError(
            f"{kind} computes something else than head(norm(blocks(embedding))): they differ by {error:.1e} (allowed "
            f"{TOLERANCE:g}); use a decoder with this structure, or train it unsplit"
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
    if training.global_batch_size > 0 and training.global_batch_size % batch:
        raise ConfigError(
            f"training.global_batch_size={training.global_batch_size} (sequences of an optimizer step) is not a multiple of "
            f"training.local_batch_size={batch}, which counts those of the whole run here; change one of them"
        )
    if training.mixed_precision_param != training.dtype:
        raise ConfigError(
            f"training.mixed_precision_param={training.mixed_precision_param!r} with training.dtype={training.dtype!r}: "
            "a disaggregated run keeps weights and computes in one dtype; set both to the same"
        )
    if training.enable_cpu_offload:
        raise ConfigError("training.enable_cpu_offload: a disaggregated run keeps its weights on the device; set it to False")
    longest = config.model_spec.model.max_seq_len
    if training.seq_len > longest:
        raise ConfigError(f"training.seq_len={training.seq_len} is more than the {longest} positions of the model; lower it")
    most = max(placement.attention) * placement.replicas
    if micro < most:
        raise ConfigError(
            f"a micro-batch of {micro} sequences over {most} attention ranks leaves some without any; raise "
            "parallelism.pipeline_parallel_microbatch_size, or use fewer attention ranks"
        )
    for name in DEGREES:
        degree = getattr(parallelism, name)
        if degree != 1:
            raise ConfigError(f"parallelism.{name}={degree}: in a disaggregated run the groups come from disag; set it to 1")
    if parallelism.data_parallel_shard_degree not in (-1, 1):
        raise ConfigError(
            f"parallelism.data_parallel_shard_degree={parallelism.data_parallel_shard_degree}: in a disaggregated run "
            "disag.shard_attention shards the weights of every attention group over its ranks; set it to -1"
        )
    if config.validator.enable and not hasattr(config.validator.dataloader, "infinite"):
        raise ConfigError(
            f"validator.dataloader of {type(config.validator.dataloader).__qualname__} has no option 'infinite', by which "
            "validation says whether to stop at the end of the data; add it, or set validator.enable=False"
        )
    if config.disag.shard_attention and getattr(config.model_spec.model, "enable_weight_tying", False):
        raise ConfigError("disag.shard_attention with tied embeddings: embedding and head are sharded apart; untie them")
    loss = config.loss
    if isinstance(loss, ChunkedLossWrapper.Config) and training.seq_len % loss.num_chunks:
        raise ConfigError(
            f"training.seq_len={training.seq_len} is not a multiple of loss.num_chunks={loss.num_chunks}, the chunks that "
            "a rank's tokens are cut into; change one of them"
        )
    check_optimizer(config.model_spec.model, config.optimizer)
    exchange_plan(config, placement)
    schedules(placement, config.disag, batch // micro)
    check_model(config.model_spec.model, placement)
    return placement


def check_optimizer(model_config: Any, optimizer: Any) -> None:
    """Refuse a pattern of ``optimizer.param_groups`` that matches no parameter of the whole model."""
    with torch.device("meta"):
        model = model_config.build()
    matched = {id(group) for group in matching_groups(optimizer.param_groups, model)}
    unmatched = [group for group in optimizer.param_groups if id(group) not in matched]
    if unmatched:
        raise ConfigError(
            f"optimizer.param_groups pattern {unmatched[0].pattern!r} matches no parameter that an earlier one has left; "
            "correct it, or leave it out"
        )


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
    check_decoder(model_config)
    seen = set()
    for i, layer in enumerate(model_config.layers):
        if getattr(layer, "moe", None) is None:
            continue
        kind = (type(layer), type(layer.attention), type(layer.moe), layer.moe.shared_experts is None)
        if kind not in seen:
            seen.add(kind)
            check_block(layer, f"layers.{i}")
