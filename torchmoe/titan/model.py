"""Small qwen3-style MoE models from torchtitan's own model code."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torchtitan.components.optimizer import register_moe_load_balancing_hook
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.models.common import CosSinRoPE, Embedding, Linear
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention
from torchtitan.models.common.config_utils import (
    make_ffn_config,
    make_gqa_config,
    make_moe_config,
    make_routed_experts_config,
    make_router_config,
)
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.models.qwen3 import Qwen3Model, parallelize_qwen3
from torchtitan.models.qwen3.model import Qwen3TransformerBlock
from torchtitan.protocols.model_spec import ModelSpec

from torchmoe.titan.shims import gloo_safe

__all__ = ["MoEModel", "model_spec"]


@dataclass(frozen=True, kw_only=True)
class MoEModel:
    """Sizes of a qwen3-style MoE. ``dense`` lists the blocks that have a plain feed-forward instead of experts; sequences have at
    most ``positions`` tokens."""

    layers: int = 2
    dim: int = 128
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    experts: int = 8
    top_k: int = 2
    expert_dim: int = 256
    shared_dim: int = 0
    dense: tuple[int, ...] = ()
    dense_dim: int = 256
    vocab: int = 256
    positions: int = 4096
    load_balance: float | None = 1e-3

    @property
    def moe_layers(self) -> int:
        return self.layers - len(self.dense)


def _inner_attention() -> Any:
    """FlexAttention has no backward on the CPU; there the causal kernel of torch is used (documents are not masked apart)."""
    return FlexAttention.Config() if torch.accelerator.is_available() else ScaledDotProductAttention.Config()


def model_spec(model: MoEModel, *, name: str = "torchmoe") -> ModelSpec:
    """A torchtitan ModelSpec of this model. It trains on torchtitan's own path as it is; a recipe swaps ``pipelining_fn``."""
    normal = partial(nn.init.normal_, std=0.02)
    linear = {"weight": normal, "bias": nn.init.zeros_}
    # residual outputs are scaled by depth, as GPT-2 does
    out = partial(nn.init.normal_, std=0.02 / (2 * model.layers) ** 0.5)

    def norm(dim: int) -> Any:
        return RMSNorm.Config(normalized_shape=dim, param_init={"weight": nn.init.ones_})

    def ffn(hidden: int) -> Any:
        return make_ffn_config(dim=model.dim, hidden_dim=hidden, w1_param_init=linear, w2w3_param_init=linear)

    def block(index: int) -> Any:
        attention = make_gqa_config(
            dim=model.dim,
            n_heads=model.heads,
            n_kv_heads=model.kv_heads,
            head_dim=model.head_dim,
            wqkv_param_init=linear,
            wo_param_init={"weight": out},
            inner_attention=_inner_attention(),
            fuse_qkv=True,
            rope=CosSinRoPE.Config(dim=model.head_dim, max_seq_len=model.positions, theta=10000.0),
            qk_norm=norm(model.head_dim),
        )
        common = {"attention": attention, "attention_norm": norm(model.dim), "ffn_norm": norm(model.dim)}
        if index in model.dense:
            return Qwen3TransformerBlock.Config(**common, feed_forward=ffn(model.dense_dim))
        moe = make_moe_config(
            num_experts=model.experts,
            router=make_router_config(
                dim=model.dim,
                num_experts=model.experts,
                gate_param_init=linear,
                top_k=model.top_k,
                score_func="softmax",
                route_norm=True,
            ),
            routed_experts=make_routed_experts_config(
                dim=model.dim,
                hidden_dim=model.expert_dim,
                num_experts=model.experts,
                top_k=model.top_k,
                param_init={"w1_EFD": normal, "w2_EDF": out, "w3_EFD": normal},
                comm_backend="standard",
            ),
            shared_experts=ffn(model.shared_dim) if model.shared_dim else None,
            load_balance_coeff=model.load_balance,
        )
        return Qwen3TransformerBlock.Config(**common, moe=moe)

    config = Qwen3Model.Config(
        vocab_size=model.vocab,
        dim=model.dim,
        norm=norm(model.dim),
        layers=[block(i) for i in range(model.layers)],
        tok_embeddings=Embedding.Config(num_embeddings=model.vocab, embedding_dim=model.dim, param_init=linear),
        lm_head=Linear.Config(in_features=model.dim, out_features=model.vocab, param_init=linear),
    )
    return ModelSpec(
        name=name,
        flavor=f"{model.layers}x{model.dim}-{model.experts}e{model.top_k}",
        model=config,
        parallelize_fn=gloo_safe(parallelize_qwen3),
        pipelining_fn=pipeline_llm,
        post_optimizer_build_fn=register_moe_load_balancing_hook,
        state_dict_adapter=None,
    )
