"""The models of the parity runs: small ones of our own, and torchtitan's debug models with fewer and smaller layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torchtitan.models import deepseek_v3, gpt_oss, qwen3
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.protocols.module import Module

from torchmoe.titan.model import MoEModel, model_spec
from torchmoe.titan.parity_data import VOCAB
from torchmoe.titan.shims import gloo_safe

__all__ = ["MODELS", "SinkAttention"]


class SinkAttention(Module):
    """Causal attention written out, with a window and the log-sum-exp that GPT-OSS's sinks need: runs on the CPU in any dtype."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        window: int | None = None

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.window = config.window

    def forward(
        self, q_BLNH: Tensor, k_BLNH: Tensor, v_BLNH: Tensor, *, scale: float, out_transform: Any, **kwargs: Any
    ) -> Tensor:
        times = q_BLNH.shape[2] // k_BLNH.shape[2]
        k_BLNH, v_BLNH = k_BLNH.repeat_interleave(times, 2), v_BLNH.repeat_interleave(times, 2)
        scores_BNLL = torch.einsum("blnh,bmnh->bnlm", q_BLNH, k_BLNH) * scale
        at = torch.arange(q_BLNH.shape[1], device=q_BLNH.device)
        away = at[:, None] - at
        hidden = (away < 0) if self.window is None else (away < 0) | (away >= self.window)
        scores_BNLL = scores_BNLL.masked_fill(hidden, -torch.inf)
        out_BLNH = torch.einsum("bnlm,bmnh->blnh", scores_BNLL.softmax(-1), v_BLNH)
        return out_transform(out_BLNH, scores_BNLL.logsumexp(-1).transpose(1, 2))  # type: ignore[no-any-return]


SIZES: dict[str, Any] = {"dim": 32, "heads": 2, "kv_heads": 1, "head_dim": 16, "experts": 8, "top_k": 2, "expert_dim": 24}


def _plain() -> ModelSpec:
    return model_spec(MoEModel(layers=3, vocab=VOCAB, **SIZES))


def _mixed() -> ModelSpec:
    """Shared experts, and dense blocks before, between and after the MoE layers."""
    return model_spec(MoEModel(layers=6, dense=(0, 2, 5), dense_dim=40, shared_dim=16, vocab=VOCAB, **SIZES))


def _debug(module: Any, layers: int) -> ModelSpec:
    """torchtitan's debug model with the first ``layers`` blocks and experts of width 32."""
    flavor = "debugmodel_moe" if module is qwen3 else "debugmodel"
    spec: ModelSpec = module.model_registry(flavor)
    del spec.model.layers[layers:]
    for layer in spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
        if layer.moe is not None:
            layer.moe.routed_experts.inner_experts.hidden_dim = 32
    spec.parallelize_fn = gloo_safe(spec.parallelize_fn)
    return spec


def _deepseek_v3() -> ModelSpec:
    """MLA, a dense first layer, shared experts; the router of the large flavours: sigmoid, bias, node-limited groups, scale."""
    spec = _debug(deepseek_v3, 3)
    for layer in spec.model.layers[1:]:
        router = layer.moe.router
        router.score_func, router.route_norm, router.route_scale = "sigmoid", True, 2.5
        router.num_expert_groups, router.num_limited_groups = 4, 2
    return spec


def _qwen3() -> ModelSpec:
    return _debug(qwen3, 2)


def _gpt_oss() -> ModelSpec:
    """Biases, clamped interleaved gates, attention sinks, and a window in every other layer."""
    spec = _debug(gpt_oss, 3)
    for i, layer in enumerate(spec.model.layers):
        layer.attention.inner_attention = SinkAttention.Config(window=5 if i % 2 else None)
    return spec


MODELS = {"plain": _plain, "mixed": _mixed, "deepseek_v3": _deepseek_v3, "qwen3": _qwen3, "gpt_oss": _gpt_oss}
