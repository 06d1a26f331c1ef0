"""The expert blocks of other libraries, on the same tensors: what the benchmarks measure torchmoe against."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.shapes import ExpertShape

__all__ = ["Block", "peers"]

Block = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(x [T, D], expert ids [T, K], gates [T, K]) -> y [T, D]."""


def peers(shape: ExpertShape, weights: dict[str, nn.Parameter], device: torch.device) -> dict[str, Block]:
    """The peers that are installed and can compute ``shape``, by name. Weights are w1 [E,F,D], w3, w2 [E,D,F]."""
    found: dict[str, Block] = {}
    if shape.activation != "swiglu" or shape.bias:
        return found
    if importlib.util.find_spec("torchtitan"):
        found["torchtitan grouped_mm"] = _torchtitan(shape, weights)
    if importlib.util.find_spec("transformers"):
        for implementation in ("eager", "grouped_mm"):
            found[f"transformers {implementation}"] = _transformers(shape, weights, implementation)
    if device.type == "cuda" and importlib.util.find_spec("liger_kernel"):
        found["liger fused_moe"] = _liger(weights)
    if device.type == "cuda" and importlib.util.find_spec("scattermoe"):
        found["scattermoe"] = _scattermoe(weights)
    return found


def _torchtitan(shape: ExpertShape, weights: dict[str, nn.Parameter]) -> Block:
    """torchtitan's local token dispatcher and grouped experts, without the experts' casts to bf16 (to compare in fp32)."""
    from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher

    dispatcher = LocalTokenDispatcher.Config(num_experts=shape.E, top_k=shape.K).build()

    def block(x: Tensor, ids: Tensor, gates: Tensor) -> Tensor:
        counts = torch.histc(ids.view(-1).float(), bins=shape.E, min=0, max=shape.E - 1)
        rows, counts, metadata = dispatcher.dispatch(x, gates, ids, counts)
        offsets = torch.cumsum(counts, 0, dtype=torch.int32)
        h = F.silu(torch._grouped_mm(rows, weights["w1"].transpose(-2, -1), offs=offsets))
        h = h * torch._grouped_mm(rows, weights["w3"].transpose(-2, -1), offs=offsets)
        y: Tensor = dispatcher.combine(torch._grouped_mm(h, weights["w2"].transpose(-2, -1), offs=offsets), metadata, x)
        return y

    return block


def _transformers(shape: ExpertShape, weights: dict[str, nn.Parameter], implementation: str) -> Block:
    from transformers.models.qwen3_moe import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    config = Qwen3MoeConfig(hidden_size=shape.D, moe_intermediate_size=shape.F, num_experts=shape.E)
    config._experts_implementation = implementation
    with torch.device("meta"):
        module: Any = Qwen3MoeExperts(config)
    # Its joint weight is one parameter, made once; its gradient is read from there.
    module.gate_up_proj = nn.Parameter(torch.cat([weights["w1"], weights["w3"]], 1).detach())
    module.down_proj = weights["w2"]

    def block(x: Tensor, ids: Tensor, gates: Tensor) -> Tensor:
        y: Tensor = module(x, ids, gates.to(x.dtype))
        return y

    block.joint = module.gate_up_proj  # type: ignore[attr-defined]
    return block


def _liger(weights: dict[str, nn.Parameter]) -> Block:
    from liger_kernel.ops.fused_moe import LigerFusedMoEFunction

    joint = nn.Parameter(torch.cat([weights["w1"], weights["w3"]], 1).detach())

    def block(x: Tensor, ids: Tensor, gates: Tensor) -> Tensor:
        y: Tensor = LigerFusedMoEFunction.apply(x, joint, weights["w2"], ids.int(), gates)
        return y

    block.joint = joint  # type: ignore[attr-defined]
    return block


def _scattermoe(weights: dict[str, nn.Parameter]) -> Block:
    from scattermoe.mlp import GLUMLP

    E, width, dim = weights["w1"].shape
    module = GLUMLP(dim, width, E, 1, activation=nn.SiLU()).to(weights["w1"].device, weights["w1"].dtype)
    with torch.no_grad():
        # scattermoe multiplies act(second half) with the first
        module.experts.weight.copy_(torch.cat([weights["w3"], weights["w1"]], 1))
        module.output_experts.weight.copy_(weights["w2"])
    module.top_k = None

    def block(x: Tensor, ids: Tensor, gates: Tensor) -> Tensor:
        module.top_k = ids.size(1)
        y: Tensor = module(x, gates.to(x.dtype), ids)
        return y

    return block
