"""The routed experts of one FFN rank as a torchtitan model part: same names as in the whole model, plain local tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.protocols.model import BaseModel
from torchtitan.protocols.module import Module, ModuleDict

from torchmoe.experts import FusedExpertMLP, RankExperts
from torchmoe.titan.checkpoint import ExpertShards

__all__ = ["ExpertPart", "LocalExperts", "expert_block"]

_WEIGHTS = ("w1_EFD", "w2_EDF", "w3_EFD")


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
    """Some experts of one layer: parameters ``w1_EFD, w2_EDF, w3_EFD`` hold the owned ones, ascending. An ``ExpertStage``.

    Args:
        owned: logical ids of the local experts.
        num_experts: logical experts of the layer.
        dim, hidden_dim: D and F.
        save: what they keep for backward, see :class:`~torchmoe.experts.FusedExpertMLP`.
    """

    def __init__(
        self, owned: Sequence[int], num_experts: int, dim: int, hidden_dim: int, *, dtype: torch.dtype, save: str = "preact"
    ) -> None:
        super().__init__()
        self.owned, self.num_experts, self.save = tuple(owned), num_experts, save
        n = len(self.owned)
        shapes = {"w1_EFD": (n, hidden_dim, dim), "w2_EDF": (n, dim, hidden_dim), "w3_EFD": (n, hidden_dim, dim)}
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape, dtype=dtype, device="meta")))
        self._stage: tuple[nn.Parameter, Any] | None = None
        self.register_state_dict_post_hook(_to_shards)
        self.register_load_state_dict_pre_hook(_from_shards)

    @classmethod
    def take(cls, experts: GroupedExperts, owned: Sequence[int], *, save: str = "preact") -> LocalExperts:
        """The local part of a (meta) GroupedExperts, with its initialisers."""
        total, hidden, dim = experts.w1_EFD.shape
        local = cls(owned, total, dim, hidden, dtype=experts.w1_EFD.dtype, save=save)
        local._param_init = experts._param_init
        return local

    def stage(self) -> Any:
        """The compute of these experts around the present parameters (``to_empty`` replaces them)."""
        if not self.owned:
            return _NoExperts()
        if self._stage is None or self._stage[0] is not self.w1_EFD:
            mlp = FusedExpertMLP.from_parameters(self.w1_EFD, self.w2_EDF, self.w3_EFD, save=self.save)
            self._stage = (self.w1_EFD, RankExperts(mlp, self.owned, self.num_experts))
        return self._stage[1]

    def forward_saved(self, rows_RD: Tensor, ids_RK: Tensor, gates_RK: Tensor) -> tuple[Tensor, Any]:
        return self.stage().forward_saved(rows_RD, ids_RK, gates_RK)  # type: ignore[no-any-return]

    def backward_input(self, saved: Any, dy_RD: Tensor) -> tuple[Tensor, Tensor, Any]:
        return self.stage().backward_input(saved, dy_RD)  # type: ignore[no-any-return]

    def shard(self, tensor: Tensor) -> ExpertShards:
        """``tensor`` [local experts, ...] as rows of the logical tensor [experts, ...]."""
        return ExpertShards(tensor, self.owned, self.num_experts)


def _to_shards(module: LocalExperts, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
    for name in _WEIGHTS:
        state_dict[prefix + name] = module.shard(state_dict[prefix + name])


def _from_shards(module: LocalExperts, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
    for name in _WEIGHTS:
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
