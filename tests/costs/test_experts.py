"""The formulas of the expert block, recomputed from tensor shapes."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.experts_kit import experts, inputs
from torchmoe.costs.experts import ExpertCosts


def test_published_bytes_per_token() -> None:
    """kernels.md 3, KiB a token: OLMoE 36 / 20 / 4, Qwen3-30B 28 / 16 / 4, DeepSeek-V3 78 / 46 / 14 (data, index apart)."""
    for (D, F, K), want in (
        ((2048, 1024, 8), (36, 20, 4)),
        ((2048, 768, 8), (28, 16, 4)),
        ((7168, 2048, 8), (78, 46, 14)),
    ):
        costs = ExpertCosts(num_experts=64, dim=D, hidden_dim=F, top_k=K)
        index = K * (8 + 4) + 4 * 65
        got = tuple((costs.saved_bytes(1, m) - index) / 1024 for m in ("preact", "half", "input"))
        assert got == want


@pytest.mark.parametrize(("gated", "bias"), itertools.product((True, False), (True, False)))
def test_parameters_are_those_of_the_module(gated: bool, bias: bool) -> None:
    module = experts(3, 6, 5, activation="swiglu" if gated else "silu", bias=bias)
    assert module.costs(2).parameters == sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize(
    ("activation", "save"), [("swiglu", "preact"), ("swiglu", "half"), ("swiglu", "input"), ("gelu", "input")]
)
def test_flops_are_what_a_count_of_matrix_products_gives(activation: str, save: str) -> None:
    """The forward and backward of an independent implementation, counted; plus the repeated GEMMs of the mode."""
    T, K, E, D, F = 6, 2, 3, 8, 4
    module = experts(E, D, F, activation=activation)
    ids = torch.randint(0, E, (T, K))
    x, _, _ = inputs(ids, D, torch.float32)
    weights = {n.split("_")[0]: p for n, p in module.named_parameters()}
    flat = ids.flatten()
    order = flat.argsort()
    rows = x.repeat_interleave(K, 0)[order]
    with FlopCounterMode(display=False) as counter:
        out = []
        for e in range(E):
            r = rows[flat[order] == e]
            h = r @ weights["w1"][e].t()
            a = torch.nn.functional.silu(h) * (r @ weights["w3"][e].t()) if "w3" in weights else torch.nn.functional.gelu(h)
            out.append(a @ weights["w2"][e].t())
        forward = counter.get_total_flops()
        torch.cat(out).sum().backward()
        total = counter.get_total_flops()
    costs = module.costs(K)
    assert costs.forward_flops(T) == forward
    repeated = {"preact": 0, "half": 1, "input": costs.halves}[save] * 2 * T * K * D * F
    assert costs.backward_flops(T, save) == total - forward + repeated
