"""Layout conversions: values land where they belong, round trips, no copy where strides allow."""

from __future__ import annotations

import pytest
import torch

from tests.experts_kit import errors, experts, inputs, routings, run
from torchmoe.errors import ConfigError
from torchmoe.experts import FusedExpertMLP
from torchmoe.layouts import join, split


def labelled(E: int, F: int, D: int, base: float = 0.0) -> torch.Tensor:
    """w[e, i, j] = base + e 1e4 + i 1e2 + j."""
    e, i, j = torch.meshgrid(torch.arange(E), torch.arange(F), torch.arange(D), indexing="ij")
    return base + e * 1e4 + i * 1e2 + j


@pytest.mark.parametrize("layout", ["concat", "interleaved"])
def test_round_trip_with_asymmetric_sizes(layout: str) -> None:
    """Dao-AILab/sonic-moe#45, vllm-project/vllm PR#52240, pytorch/torchtitan PR#4373: gate and up taken for one another."""
    gate, up = labelled(3, 4, 5), labelled(3, 4, 5, base=1e6)
    joint = join(gate, up, layout)
    assert joint.shape == (3, 8, 5)
    row = {"concat": lambda i, half: i + 4 * half, "interleaved": lambda i, half: 2 * i + half}[layout]
    for i in range(4):
        assert torch.equal(joint[:, row(i, 0)], gate[:, i]) and torch.equal(joint[:, row(i, 1)], up[:, i])
    back = split(joint, layout)
    assert torch.equal(back[0], gate) and torch.equal(back[1], up)
    assert all(t.untyped_storage().data_ptr() == joint.untyped_storage().data_ptr() for t in back)


@pytest.mark.parametrize("layout", ["concat", "interleaved"])
@pytest.mark.parametrize("transposed", [False, True])
def test_halves_of_one_tensor_join_without_a_copy(layout: str, transposed: bool) -> None:
    """marin-community/marin#5328: the conversion costs 0.2 to 0.3 ms a step elsewhere."""
    whole = torch.randn(3, 5, 8).transpose(1, 2) if transposed else torch.randn(3, 8, 5)
    joint = join(*split(whole, layout), layout)
    assert torch.equal(joint, whole) and joint.data_ptr() == whole.data_ptr()
    other = "concat" if layout == "interleaved" else "interleaved"
    moved = join(*split(whole, layout), other)
    assert torch.equal(split(moved, other)[0], split(whole, layout)[0]) and moved.data_ptr() != whole.data_ptr()


@pytest.mark.parametrize("layout", ["concat", "interleaved"])
def test_the_module_computes_the_same_in_every_layout(layout: str) -> None:
    module = experts(7, 6, 5, bias=True, dtype=torch.float64)
    joint = FusedExpertMLP(7, 6, 5, bias=True, layout=layout, dtype=torch.float64)
    with torch.no_grad():
        joint.w13_EGD.copy_(join(module.w1_EFD, module.w3_EFD, layout))
        joint.b13_EG.copy_(join(module.b1_EF, module.b3_EF, layout))
        joint.w2_EDF.copy_(module.w2_EDF)
        joint.b2_ED.copy_(module.b2_ED)
    ids = routings()["sentinels"]
    want = run(module, ids, *inputs(ids, 6, torch.float64))
    got = run(joint, ids, *inputs(ids, 6, torch.float64))
    assert max(errors(got, want).values()) < 1e-12


def test_refused_layouts_are_named() -> None:
    w = torch.zeros(2, 3, 4)
    for call, text in (
        (lambda: split(w, "concat"), r"\(2, 3, 4\)"),
        (lambda: split(torch.zeros(2, 4, 4), "split"), "'split'"),
        (lambda: join(w, w, "rows"), "'rows'"),
        (lambda: join(w, w[:1], "concat"), "differ"),
    ):
        with pytest.raises(ConfigError, match=text):
            call()
