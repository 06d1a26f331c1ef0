"""The routed experts of one FFN rank as a torchtitan model part: same names as in the whole model, plain local tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts
from torchtitan.protocols.model import BaseModel
from torchtitan.protocols.module import Module, ModuleDict

from torchmoe.errors import ConfigError
from torchmoe.experts import FusedExpertMLP, RankExperts
from torchmoe.kernels.activations import CLAMP_LIMIT
from torchmoe.titan.checkpoint import ExpertShards

__all__ = ["FAMILIES", "ExpertPart", "Family", "LocalExperts", "expert_block", "family_of"]


def _glu(experts: Any, **options: Any) -> FusedExpertMLP:
    return FusedExpertMLP.from_parameters(experts.w1_EFD, experts.w2_EDF, experts.w3_EFD, **options)


def _gpt_oss(experts: Any, **options: Any) -> FusedExpertMLP:
    biases = (experts.mlp1_bias_EG, None, experts.mlp2_bias_ED)
    weights = experts.mlp1_weight_EGD, experts.mlp2_weight_EDF
    return FusedExpertMLP.from_parameters(*weights, biases=biases, activation="clamped_swiglu", layout="interleaved", **options)


class Family(NamedTuple):
    """A class of torchtitan's experts that FFN ranks can run."""

    parameters: tuple[str, ...]
    last: tuple[str, ...]
    """The parameters of the last projection: with all of them zero the experts return zero."""
    mlp: Callable[..., FusedExpertMLP]
    """The computation over the parameters of a module, without a copy."""


FAMILIES: dict[type, Family] = {
    GroupedExperts: Family(("w1_EFD", "w2_EDF", "w3_EFD"), ("w2_EDF",), _glu),
    GptOssGroupedExperts: Family(
        ("mlp1_weight_EGD", "mlp1_bias_EG", "mlp2_weight_EDF", "mlp2_bias_ED"), ("mlp2_weight_EDF", "mlp2_bias_ED"), _gpt_oss
    ),
}


def family_of(experts: Any, name: str) -> Family:
    """The family of a torchtitan experts module.

    Raises:
        ConfigError: FFN ranks do not run experts of this class.
    """
    family = FAMILIES.get(type(experts))
    if family is None:
        raise ConfigError(
            f"{name}: experts of class {type(experts).__name__} may compute something else than what FFN ranks run "
            f"({', '.join(c.__name__ for c in FAMILIES)}); use one of these"
        )
    limit = getattr(experts, "swiglu_limit", CLAMP_LIMIT)
    if limit != CLAMP_LIMIT:
        raise ConfigError(f"{name}: swiglu_limit={limit}, and the kernels clamp at {CLAMP_LIMIT}; use that limit")
    return family


class _NoWork:
    def run(self) -> None:
        pass


class _NoExperts:
    """Stage of a rank that owns no expert of a layer: it never gets a row."""

    def forward_saved(self, rows_RD: Tensor, ids_RK: Tensor, gates_RK: Tensor) -> tuple[Tensor, Any]:
        return torch.zeros_like(rows_RD), gates_RK

    def backward_input(self, saved: Tensor, dy_RD: Tensor) -> tuple[Tensor, Tensor, _NoWork]:
        return torch.zeros_like(dy_RD), torch.zeros_like(saved), _NoWork()


class LocalExperts(Module):
    """Some experts of one layer: parameters of the family's names hold the owned ones, ascending. An ``ExpertStage``.

    Args:
        experts: the layer's experts, usually on the meta device: shapes, dtypes and initialisers are theirs.
        owned: logical ids of the local experts.
        save: what they keep for backward, see :class:`~torchmoe.experts.FusedExpertMLP`.
    """

    def __init__(self, experts: Any, owned: Sequence[int], *, save: str = "preact") -> None:
        super().__init__()
        self.owned, self.num_experts, self.save = tuple(owned), experts.num_experts, save
        self.family = family_of(experts, "experts")
        self._param_init = experts._param_init
        for name in self.family.parameters:
            whole = getattr(experts, name)
            local = torch.empty(len(self.owned), *whole.shape[1:], dtype=whole.dtype, device="meta")
            self.register_parameter(name, nn.Parameter(local))
        self._stage: tuple[nn.Parameter, Any] | None = None
        self.register_state_dict_post_hook(_to_shards)
        self.register_load_state_dict_pre_hook(_from_shards)

    def stage(self) -> Any:
        """The compute of these experts around the present parameters (``to_empty`` replaces them)."""
        if not self.owned:
            return _NoExperts()
        first: nn.Parameter = getattr(self, self.family.parameters[0])
        if self._stage is None or self._stage[0] is not first:
            mlp = self.family.mlp(self, save=self.save)
            self._stage = (first, RankExperts(mlp, self.owned, self.num_experts))
        return self._stage[1]

    def forward_saved(self, rows_RD: Tensor, ids_RK: Tensor, gates_RK: Tensor) -> tuple[Tensor, Any]:
        return self.stage().forward_saved(rows_RD, ids_RK, gates_RK)  # type: ignore[no-any-return]

    def backward_input(self, saved: Any, dy_RD: Tensor) -> tuple[Tensor, Tensor, Any]:
        return self.stage().backward_input(saved, dy_RD)  # type: ignore[no-any-return]

    def shard(self, tensor: Tensor) -> ExpertShards:
        """``tensor`` [local experts, ...] as rows of the logical tensor [experts, ...]."""
        return ExpertShards(tensor, self.owned, self.num_experts)


def _to_shards(module: LocalExperts, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
    for name in module.family.parameters:
        state_dict[prefix + name] = module.shard(state_dict[prefix + name])


def _from_shards(module: LocalExperts, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
    for name in module.family.parameters:
        value = state_dict.get(prefix + name)
        if isinstance(value, ExpertShards):
            state_dict[prefix + name] = value.local


class _Holder(Module):
    """A level of the name; ``moe_enabled`` is False so that nothing takes it for a whole MoE block."""

    moe_enabled = False

    def __init__(self, **children: Module) -> None:
        super().__init__()
        for name, child in children.items():
            setattr(self, name, child)


def expert_block(experts: LocalExperts, ffn_norm: Module | None = None, shared_experts: Module | None = None) -> Module:
    """What an FFN rank holds of a block, under the block's own names."""
    shared = {} if shared_experts is None else {"shared_experts": shared_experts}
    norm = {} if ffn_norm is None else {"ffn_norm": ffn_norm}
    return _Holder(moe=_Holder(routed_experts=_Holder(inner_experts=experts), **shared), **norm)


class ExpertPart(BaseModel):
    """The model part of an FFN rank: its blocks by name, and norm and head where the rank has them."""

    _skip_lm_head = False  # set where a chunked loss applies the head itself

    def __init__(self, blocks: Mapping[str, Module], *, norm: Module | None = None, lm_head: Module | None = None) -> None:
        super().__init__()
        self.layers = ModuleDict(dict(blocks))
        self.norm, self.lm_head = norm, lm_head

    def experts(self) -> dict[str, LocalExperts]:
        """Name in the whole model -> local experts."""
        return {name: m for name, m in self.named_modules() if isinstance(m, LocalExperts)}
