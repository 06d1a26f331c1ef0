"""Parameters and FLOPs of a shape equal what torchtitan's models have, counted on the meta device."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from torchmoe.alloc.models import MoESpec
from torchmoe.costs import attention_context, forward_flops, layer_flops, model_flops, recompute_factor
from torchmoe.errors import ConfigError

TITAN = [
    ("qwen3", "debugmodel_moe"),
    ("qwen3", "30B-A3B"),
    ("qwen3", "235B-A22B"),
    ("deepseek_v3", "debugmodel"),
    ("deepseek_v3", "16B"),
    ("deepseek_v3", "671B"),
    ("gpt_oss", "debugmodel"),
    ("gpt_oss", "120b"),
]


def titan_spec(family: str, flavor: str) -> Any:
    pytest.importorskip("torchtitan", reason="counts torchtitan's models")
    return importlib.import_module(f"torchtitan.models.{family}").model_registry(flavor, attn_backend="flex")


@pytest.mark.parametrize(("family", "flavor"), TITAN)
def test_parameters_equal_torchtitans(family: str, flavor: str) -> None:
    spec = titan_spec(family, flavor)
    with torch.device("meta"):
        model = spec.model.build()
    assert MoESpec.from_torchtitan(spec).num_params == sum(p.numel() for p in model.parameters())


def _run_layer_products(block: Any, x: torch.Tensor, shape: MoESpec) -> None:
    """All matrix products of a torchtitan block on the meta device, from its own parameters: each token meets K experts."""
    att = block.attention
    tokens = x.shape[0] * x.shape[1]
    linears = [m for m in att.modules() if isinstance(m, torch.nn.Linear)]
    for lin in linears:
        lin(torch.empty(tokens, lin.in_features, device="meta"))
    q = torch.empty(x.shape[0], shape.num_heads, x.shape[1], shape.qk_dim, device="meta")
    v = torch.empty(x.shape[0], shape.num_heads, x.shape[1], shape.v_dim, device="meta")
    F.scaled_dot_product_attention(q, torch.empty_like(q), v)
    if getattr(block, "moe", None) is None:
        block.feed_forward(x)
        return
    block.moe.router.gate(x)
    if block.moe.shared_experts is not None:
        block.moe.shared_experts(x)
    experts = block.moe.routed_experts.inner_experts
    for w in experts.parameters():
        if w.dim() == 3:  # [E, out, in]: K of E experts' products per token
            torch.empty(shape.top_k * tokens, w.shape[2], device="meta") @ w[0].t()


@pytest.mark.parametrize(("family", "flavor"), [t for t in TITAN if t[1] not in ("671B", "235B-A22B", "120b")])
def test_forward_flops_equal_torchs_counter(family: str, flavor: str) -> None:
    spec = titan_spec(family, flavor)
    shape = MoESpec.from_torchtitan(spec)
    with torch.device("meta"):
        model = spec.model.build()
    seq = 512
    x = torch.empty(2, seq, shape.dim, device="meta")
    with FlopCounterMode(display=False) as counter:
        for block in model.layers.values():
            _run_layer_products(block, x, shape)
        model.lm_head(x)
    # torch counts dense products: no causal half, no window
    full = MoESpec.from_dict({**shape.to_dict(), "windows": [0]})
    expected = forward_flops(full, seq_len=seq, causal=False) * 2 * seq
    assert counter.get_total_flops() == pytest.approx(expected, rel=0.01)


def test_flops_agree_with_torchtitans_own_estimate() -> None:
    """torchtitan's nflops per token (6 x active parameters + attention without the causal half) within 1 %."""
    spec = titan_spec("qwen3", "30B-A3B")
    shape = MoESpec.from_torchtitan(spec)
    with torch.device("meta"):
        model = spec.model.build()
    _, titan = spec.model.get_nparams_and_flops(model, 4096)
    assert model_flops(shape, seq_len=4096, causal=False) == pytest.approx(titan, rel=0.01)


@pytest.mark.parametrize(("seq", "window"), [(1, 0), (7, 0), (7, 3), (5, 9), (64, 16), (64, 1)])
def test_attention_context_is_the_mean_of_the_mask(seq: int, window: int) -> None:
    i, j = torch.arange(seq)[:, None], torch.arange(seq)[None]
    mask = (j <= i) & ((i - j < window) if window else True)
    assert attention_context(seq, window=window) == pytest.approx(mask.double().sum(1).mean().item())
    assert attention_context(seq, window=window, causal=False) == (min(window, seq) if window else seq)


def test_recompute_factors_count_repeated_products() -> None:
    assert recompute_factor("none") == 3
    assert recompute_factor("full") == 4
    # kernels.md 3a: 22 % and 11 % of the 18 Tknd of a GLU layer
    assert recompute_factor("none", save="input") / 3 - 1 == pytest.approx(4 / 18)
    assert recompute_factor("none", save="half") / 3 - 1 == pytest.approx(2 / 18)
    assert recompute_factor("none", save="input", matrices=2) == 3.5


def test_windows_and_dense_layers_enter_layer_by_layer() -> None:
    shape = MoESpec(
        num_layers=3, dim=8, num_heads=2, num_experts=4, top_k=2, expert_dim=16, num_dense_layers=1, dense_dim=32, windows=(4, 0)
    )
    flops = [layer_flops(shape, layer=i, seq_len=64) for i in range(3)]
    assert flops[0].experts == 0 and flops[0].dense == 2 * 3 * 8 * 32
    assert flops[1].dense == 0 and flops[1].experts == 2 * 3 * 8 * 16 * 2
    assert flops[0].scores == flops[2].scores < flops[1].scores


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"top_k": 9}, "top_k=9"),
        ({"num_kv_heads": 3}, "num_kv_heads=3"),
        ({"num_dense_layers": 2}, "leaves no MoE layer"),
        ({"num_dense_layers": 1}, "dense_dim"),
        ({"num_heads": 3, "num_kv_heads": 0}, "head_dim"),
        ({"dim": 0}, "dim=0"),
        ({"num_layers": 2.5}, "num_layers=2.5"),
        ({"kv_lora_rank": 4}, "qk_nope_head_dim"),
        ({"glu": 1}, "glu=1"),
    ],
)
def test_impossible_shapes_are_refused_with_their_value(change: dict[str, Any], text: str) -> None:
    good = {"num_layers": 2, "dim": 8, "num_heads": 2, "num_experts": 8, "top_k": 2, "expert_dim": 4}
    with pytest.raises(ConfigError, match=text):
        MoESpec(**{**good, **change})
