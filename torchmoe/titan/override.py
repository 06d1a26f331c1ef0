"""torchtitan's experts on torchmoe's kernels, by one line in a recipe.

* ``config.override.imports = ["torchmoe.titan.override.grouped_experts"]``: the grouped MLP alone, behind any token dispatcher
  (expert parallelism included). Parameters, names, layouts and checkpoints are torchtitan's.
* ``config.override.imports = ["torchmoe.titan.override.routed_experts"]``: dispatch, MLP and combine in one, without a routed
  copy of the tokens; for one device per expert set (no expert parallelism).

Unlike torchtitan's, which always computes in bfloat16, they compute in the dtype of the tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchtitan.config import derive, override
from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher

from torchmoe.dispatch import DispatchQueue
from torchmoe.errors import ConfigError
from torchmoe.kernels import ops, scheme

__all__ = ["TorchMoEGroupedExperts", "TorchMoERoutedExperts", "grouped_experts", "routed_experts"]


def _weights(module: GroupedExperts, dtype: torch.dtype) -> scheme.Weights:
    local = (w.to_local() if isinstance(w, DTensor) else w for w in (module.w1_EFD, module.w3_EFD, module.w2_EDF))
    return scheme.Weights(*(w.to(dtype) for w in local))


def _run(x_TD: Tensor, gates: Tensor, index: scheme.Index, weights: scheme.Weights, save: str) -> Tensor:
    tracked = (x_TD, gates, *(w for w in weights if w is not None))
    grad = torch.is_grad_enabled() and any(t.requires_grad for t in tracked)
    return ops.expert_mlp(x_TD, gates, index, None, weights, activation="swiglu", layout="split", save=save if grad else "none")


class TorchMoEGroupedExperts(GroupedExperts):
    """GroupedExperts whose forward is the fused expert MLP over rows that are already in expert order."""

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        save: str = "preact"

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.save = _save_mode(config.save)

    def forward(self, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
        """See GroupedExperts.forward; rows past the counts give 0."""
        R, device = x_RD.size(0), x_RD.device
        offsets = torch.zeros(num_tokens_per_expert_E.numel() + 1, dtype=torch.int32, device=device)
        offsets[1:] = torch.cumsum(num_tokens_per_expert_E, 0, dtype=torch.int32)
        rows = torch.arange(R, dtype=torch.int32, device=device)
        exists = rows < offsets[-1]
        # Each row is its own token: the queue is the identity, and the gates stay with the token dispatcher.
        index = scheme.Index(torch.where(exists, rows, -1), offsets, torch.where(exists, rows, -1)[:, None])
        gates = torch.ones(R, 1, dtype=torch.float32, device=device)
        return _run(x_RD, gates, index, _weights(self, x_RD.dtype), self.save)


class TorchMoERoutedExperts(RoutedExperts):
    """RoutedExperts without a dispatcher: the queue replaces the routed copy of the tokens."""

    @dataclass(kw_only=True, slots=True)
    class Config(RoutedExperts.Config):
        save: str = "preact"

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.save = _save_mode(config.save)
        if type(self.token_dispatcher) is not LocalTokenDispatcher:
            raise ConfigError(
                f"routed_experts replaces the local dispatch, and this model has a {type(self.token_dispatcher).__name__}; "
                "use torchmoe.titan.override.grouped_experts with it"
            )

    def forward(
        self, x_BLD: Tensor, topk_scores_BLK: Tensor, topk_expert_ids_BLK: Tensor, num_local_tokens_per_expert_E: Tensor
    ) -> Tensor:
        """See RoutedExperts.forward."""
        B, L, D = x_BLD.shape
        K = topk_scores_BLK.size(-1)
        queue = DispatchQueue.build(topk_expert_ids_BLK.view(B * L, K), self.inner_experts.num_experts)
        gates = topk_scores_BLK.reshape(B * L, K)
        x_TD = x_BLD.reshape(B * L, D)
        y_TD = _run(x_TD, gates, queue.index, _weights(self.inner_experts, x_TD.dtype), self.save)
        return y_TD.view(B, -1, D)


def _save_mode(save: str) -> str:
    if save not in scheme.SAVE_MODES:
        raise ConfigError(f"save={save!r} is unknown; use one of {', '.join(scheme.SAVE_MODES)}")
    return save


@override(target=GroupedExperts.Config, description="Grouped experts on torchmoe's kernels.", exact=True)  # type: ignore[untyped-decorator]
def grouped_experts(cfg: GroupedExperts.Config, save: str = "preact") -> TorchMoEGroupedExperts.Config:
    """Override factory; ``save`` as in FusedExpertMLP."""
    config: TorchMoEGroupedExperts.Config = derive(cfg, TorchMoEGroupedExperts.Config, save=save)
    return config


@override(target=RoutedExperts.Config, description="Dispatch, experts and combine in one, on torchmoe's kernels.", exact=True)  # type: ignore[untyped-decorator]
def routed_experts(cfg: RoutedExperts.Config, save: str = "preact") -> TorchMoERoutedExperts.Config:
    """Override factory; ``save`` as in FusedExpertMLP."""
    config: TorchMoERoutedExperts.Config = derive(cfg, TorchMoERoutedExperts.Config, save=save)
    return config
