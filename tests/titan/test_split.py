"""A split block computes what torchtitan's block computes, or the model is refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchmoe.errors import ConfigError
from torchmoe.titan.shims import ensure

ensure()

from torchtitan.config import derive  # noqa: E402
from torchtitan.models.common.moe import GroupedExperts  # noqa: E402
from torchtitan.models.qwen3.model import Qwen3TransformerBlock  # noqa: E402

from torchmoe.placement import Placement  # noqa: E402
from torchmoe.titan.check import check_block  # noqa: E402
from torchmoe.titan.model import MoEModel, model_spec  # noqa: E402
from torchmoe.titan.split import block_plan, split_model  # noqa: E402

SMALL = MoEModel(layers=3, dim=32, heads=2, kv_heads=1, head_dim=16, experts=8, expert_dim=24, vocab=64)


def config(**change: Any) -> Any:
    return model_spec(MoEModel(**{**vars(SMALL), **change})).model


@given(st.lists(st.booleans(), max_size=12))
def test_every_block_is_in_one_unit_and_in_order(is_moe: list[bool]) -> None:
    names = [str(i) for i in range(len(is_moe))]
    plan = block_plan(names, is_moe)
    flat = [n for dense, moe in zip(plan.dense, (*plan.moe, None), strict=True) for n in (*dense, moe) if n is not None]
    assert flat == names
    assert plan.moe == tuple(n for n, m in zip(names, is_moe, strict=True) if m)


@pytest.mark.parametrize("change", [{}, {"shared_dim": 16}, {"experts": 64, "top_k": 5}, {"kv_heads": 2}])
def test_a_usual_block_passes_the_check(change: dict[str, Any]) -> None:
    check_block(config(**change).layers[0], "layers.0")


class PostNorm(Qwen3TransformerBlock):
    @dataclass(kw_only=True, slots=True)
    class Config(Qwen3TransformerBlock.Config):
        pass

    def forward(self, x: Any, masks: Any, positions: Any = None) -> Any:
        x = x + self.attention(self.attention_norm(x), masks, positions)
        return x + self.ffn_norm(self.moe(self.ffn_norm(x)))


class Scaled(Qwen3TransformerBlock):
    @dataclass(kw_only=True, slots=True)
    class Config(Qwen3TransformerBlock.Config):
        pass

    def forward(self, x: Any, masks: Any, positions: Any = None) -> Any:
        return 1.001 * super().forward(x, masks, positions)


class NoNorm(Qwen3TransformerBlock):
    @dataclass(kw_only=True, slots=True)
    class Config(Qwen3TransformerBlock.Config):
        pass

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        del self.ffn_norm

    def forward(self, x: Any, masks: Any, positions: Any = None) -> Any:
        return x + self.moe(x)


@pytest.mark.parametrize("cls, word", [(PostNorm, "differ by"), (Scaled, "differ by"), (NoNorm, "cannot be split")])
def test_another_block_is_refused_with_the_reason(cls: Any, word: str) -> None:
    other = derive(config().layers[0], cls.Config)
    with pytest.raises(ConfigError, match=word) as e:
        check_block(other, "layers.0")
    assert "layers.0" in str(e.value)


def build(cfg: Any) -> Any:
    with torch.device("meta"):
        return cfg.build()


def placement(attention: list[int], ffn: list[int], layers: int = 3) -> Placement:
    return Placement(attention=attention, ffn=ffn, num_layers=layers, num_experts=8)


@pytest.mark.parametrize("attention, ffn", [([1], [1]), ([2, 1], [1, 2]), ([1, 1, 1], [3]), ([2], [2, 1])])
def test_the_parts_of_all_ranks_are_the_whole_model(attention: list[int], ffn: list[int]) -> None:
    cfg = config(layers=5, dense=(1, 4))
    whole = {n: p.shape for n, p in build(cfg).named_parameters()}
    pl = placement(attention, ffn)
    seen: dict[str, set[int]] = {}
    for rank in range(pl.world_size):
        where = pl.where(rank)
        part, stages, _ = split_model(build(cfg), pl, where, loss_fn=None)
        assert set(stages.attention) | set(stages.experts) <= set(range(3))
        for name, p in part.named_parameters():
            if "inner_experts" in name:
                layer = [0, 2, 3].index(int(name.split(".")[1]))
                owned = pl.local_experts(layer, where.index)
                assert p.shape == (len(owned), *whole[name][1:])
                assert not seen.setdefault(name, set()) & set(owned)
                seen[name] |= set(owned)
            else:
                assert p.shape == whole[name]
                seen[name] = set(range(8))
    assert seen == {n: set(range(8)) for n in whole}


def test_tied_embeddings_across_groups_are_refused_and_within_one_kept() -> None:
    cfg = config()
    cfg.enable_weight_tying = True
    with pytest.raises(ConfigError, match="tied embeddings"):
        split_model(build(cfg), placement([1, 1], [1]), placement([1, 1], [1]).where(0), loss_fn=None)
    part, _, _ = split_model(build(cfg), placement([1], [1]), placement([1], [1]).where(0), loss_fn=None)
    assert part.tok_embeddings.weight is part.lm_head.weight


def test_other_experts_and_dense_models_are_refused() -> None:
    class Clamped(GroupedExperts):
        pass

    model = build(config())
    model.layers["1"].moe.routed_experts.inner_experts.__class__ = Clamped
    with pytest.raises(ConfigError, match=r"layers\.1: experts of class Clamped"):
        split_model(model, placement([1], [1]), placement([1], [1]).where(0), loss_fn=None)
    with pytest.raises(ConfigError, match="no MoE block"):
        split_model(build(config(dense=(0, 1, 2))), placement([1], [1]), placement([1], [1]).where(0), loss_fn=None)
    with pytest.raises(ConfigError, match="3 MoE layers, the placement 2"):
        split_model(build(config()), placement([1], [1], 2), placement([1], [1], 2).where(0), loss_fn=None)
