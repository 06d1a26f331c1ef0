"""torchtitan without its forced casts, so that layouts can be compared in fp64 or fp32.

torchtitan computes routed experts in bfloat16 and casts to fp32 in RoPE, in the combine and in the loss. Inside
:func:`exact_casts` all of that runs in one dtype, in every layout alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchtitan.components import loss as titan_loss
from torchtitan.distributed.spmd_types import current_spmd_mesh, maybe_set_sparse_mesh
from torchtitan.distributed.utils import get_spmd_backend
from torchtitan.models.common import token_dispatcher
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.models.common.rope import ComplexRoPE, CosSinRoPE
from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts, swiglu

from torchmoe.titan.expert_part import FAMILIES

__all__ = ["exact_casts"]


def _local(t: Tensor) -> Tensor:
    return t.to_local() if isinstance(t, DTensor) else t  # type: ignore[no-any-return]


def _experts(self: Any, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
    """Per expert, silu(x W1) * (x W3) W2 in the dtype of x."""
    w1, w2, w3 = _local(self.w1_EFD), _local(self.w2_EDF), _local(self.w3_EFD)
    out, at = [], 0
    for e, n in enumerate(num_tokens_per_expert_E.tolist()):
        x = x_RD[at : at + int(n)]
        out.append((F.silu(x @ w1[e].T) * (x @ w3[e].T)) @ w2[e].T)
        at += int(n)
    out.append(x_RD[at:] * 0)  # rows past the last expert (padding)
    return torch.cat(out)


def _combine(self: Any, routed_output_RD: Tensor, metadata: Any, x_TD: Tensor) -> Tensor:
    rows = routed_output_RD * metadata.topk_scores_experts_sorted_N.reshape(-1, 1).to(routed_output_RD.dtype)
    return torch.zeros_like(x_TD).index_add(0, metadata.token_indices_experts_sorted_N, rows)


def _combine_ep(self: Any, routed_output_RD: Tensor, metadata: Any, x_TD: Tensor) -> Tensor:
    if self.ep_mesh is None:
        return _combine(self, routed_output_RD, metadata, x_TD)
    with maybe_set_sparse_mesh():
        spmd = get_spmd_backend() == "spmd_types"
        group = current_spmd_mesh().get_group("ep") if spmd else self.ep_mesh.get_group()
        rows = self._unpermute(routed_output_RD, metadata.input_shape, metadata.permuted_indices)
        rows = self._combine_token_exchange(rows, group, metadata.input_splits, metadata.output_splits)
    return _combine(self, rows, metadata, x_TD)


def _rope(query: Tensor, key: Tensor, rope_cache: Tensor) -> tuple[Tensor, Tensor]:
    dim = query.shape[-1]
    cos, sin = rope_cache[..., :dim].to(query.dtype), rope_cache[..., dim:].to(query.dtype)
    rotate = CosSinRoPE._rotate_half
    return query * cos + rotate(query) * sin, key * cos + rotate(key) * sin


def _complex_rope(query: Tensor, key: Tensor, rope_cache: Tensor) -> tuple[Tensor, Tensor]:
    def rotate(t: Tensor) -> Tensor:
        pairs = torch.view_as_complex(t.reshape(*t.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * rope_cache.to(pairs.dtype)).flatten(3)

    return rotate(query), rotate(key)


def _gpt_oss_experts(self: Any, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
    """Per expert, swiglu(x W1 + b1) W2 + b2 in the dtype of x."""
    w1, b1, w2, b2 = (_local(getattr(self, n)) for n in FAMILIES[GptOssGroupedExperts].parameters)
    out, at = [], 0
    for e, n in enumerate(num_tokens_per_expert_E.tolist()):
        x = x_RD[at : at + int(n)]
        out.append(swiglu(x @ w1[e].T + b1[e], limit=self.swiglu_limit) @ w2[e].T + b2[e])
        at += int(n)
    out.append(x_RD[at:] * 0)  # rows past the last expert (padding)
    return torch.cat(out)


def _cross_entropy(pred: Tensor, labels: Tensor, *, global_vocab_size: int | None = None) -> Tensor:
    return F.cross_entropy(pred.flatten(0, 1), labels.flatten(0, 1), reduction="sum", ignore_index=titan_loss.IGNORE_INDEX)


@contextmanager
def exact_casts(dtype: torch.dtype) -> Iterator[None]:
    """Inside, torchtitan's models and losses that are built and run compute in their own dtype.

    Args:
        dtype: fp32 or fp64; also registered as torchtitan's ``training.dtype`` of that name.
    """
    from torchtitan.config import TORCH_DTYPE_MAP

    name = str(dtype).removeprefix("torch.")
    with ExitStack() as stack:
        for target, attribute, value in (
            (GroupedExperts, "forward", _experts),
            (token_dispatcher.LocalTokenDispatcher, "combine", _combine),
            (token_dispatcher.AllToAllTokenDispatcher, "combine", _combine_ep),
            (GptOssGroupedExperts, "forward", _gpt_oss_experts),
            (CosSinRoPE, "apply_rotary_emb", staticmethod(_rope)),
            (ComplexRoPE, "apply_rotary_emb", staticmethod(_complex_rope)),
            (titan_loss, "cross_entropy_loss", _cross_entropy),
        ):
            stack.enter_context(mock.patch.object(target, attribute, value))
        stack.enter_context(mock.patch.dict(TORCH_DTYPE_MAP, {name: dtype}))
        yield
