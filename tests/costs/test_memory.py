"""Saved bytes against saved-tensor hooks on the modules that run, and the parts of a rank's memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from torchmoe.alloc.models import MoESpec
from torchmoe.costs import ExpertCosts, ModelShape, attention_saved_bytes, expert_saved_bytes, live_units_1f1b, live_units_af
from torchmoe.costs.memory import FP32, MIXED, attention_rank_memory, expert_rank_memory, expert_rank_peak
from torchmoe.dispatch import DispatchQueue
from torchmoe.errors import ConfigError
from torchmoe.experts import FusedExpertMLP

SHAPE = MoESpec(
    name="m", num_layers=4, dim=64, num_heads=4, num_kv_heads=2, num_experts=8, top_k=2, expert_dim=32, vocab_size=100
)


def saved_by(run: Any, leave_out: set[int]) -> int:
    """Bytes of distinct storages that autograd keeps, those in ``leave_out`` excepted."""
    seen: dict[int, int] = {}
    kept = []

    def pack(t: torch.Tensor) -> torch.Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in leave_out:
            seen[storage.data_ptr()] = storage.nbytes()
            kept.append(t)  # an address must not be used twice
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = run()
    del out
    return sum(seen.values())


@pytest.mark.parametrize("shared", [0, 96])
@pytest.mark.parametrize(("heads", "kv", "head_dim"), [(4, 2, 32), (6, 1, 16)])
def test_the_attention_half_keeps_what_the_formula_says(heads: int, kv: int, head_dim: int, shared: int) -> None:
    """torchtitan's block as the main job splits it, fp32 on the CPU: equal to the byte."""
    pytest.importorskip("torchtitan", reason="measures torchtitan's block")
    from torchmoe.titan.shims import ensure

    ensure()
    from torchmoe.titan.model import MoEModel, model_spec
    from torchmoe.titan.split import attention_half

    sizes = {"dim": 128, "heads": heads, "kv_heads": kv, "head_dim": head_dim, "experts": 16, "top_k": 3}
    spec = model_spec(MoEModel(layers=1, expert_dim=64, shared_dim=shared, **sizes))
    model = spec.model.build()
    model.init_weights(buffer_device=torch.device("cpu"))
    block = next(iter(model.layers.values()))
    tokens = 96
    x = torch.randn(tokens, 128, requires_grad=True)
    positions = torch.arange(tokens)[None]
    fixed = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    got = saved_by(lambda: attention_half(block, x, [tokens], None, positions), fixed)
    expected = attention_saved_bytes(MoESpec.from_torchtitan(spec), itemsize=4, fused_norm=False) * tokens
    assert got == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("save", ["input", "half", "preact", "all"])
def test_the_experts_keep_what_the_formula_says(save: str) -> None:
    tokens = 50
    mlp = FusedExpertMLP(8, 64, 32, save=save)
    x = torch.randn(tokens, 64, requires_grad=True)
    ids = torch.rand(tokens, 8).topk(2).indices.int()
    queue = DispatchQueue.build(ids, 8)
    gates = torch.rand(tokens, 2, requires_grad=True)
    got = saved_by(lambda: mlp(x, queue, gates), {p.untyped_storage().data_ptr() for p in mlp.parameters()})
    assert got == expert_saved_bytes(SHAPE, save=save, itemsize=4, rows=tokens, experts=8)
    costs = ExpertCosts(8, 64, 32, 2, element_size=4)
    assert got == costs.saved_bytes(tokens, save)


def test_save_modes_are_checked() -> None:
    with pytest.raises(ConfigError, match="save='none'"):
        expert_saved_bytes(SHAPE, save="none")
    with pytest.raises(ConfigError, match="one of the two halves"):
        expert_saved_bytes(replace(SHAPE, glu=False), save="half")


def test_state_is_sixteen_bytes_per_parameter_and_shards() -> None:
    assert MIXED.state == FP32.state == 16
    full = expert_rank_memory(SHAPE, layers=2, experts=4, rows=0, pairs=0, live_units=0)
    assert full.state == 16 * 2 * 4 * SHAPE.expert_params
    shared = expert_rank_memory(SHAPE, layers=2, experts=4, rows=0, pairs=0, live_units=0, optimizer_copies=4)
    assert shared.state == full.weights + full.gradients + full.optimizer / 4
    first = attention_rank_memory(SHAPE, layers=2, embedding=True, tokens=10, live_units=3, rows_per_token=2)
    inner = attention_rank_memory(SHAPE, layers=2, tokens=10, live_units=3, rows_per_token=2)
    assert first.state - inner.state == 16 * SHAPE.embedding_params
    assert inner.activations == 3 * 10 * attention_saved_bytes(SHAPE)
    lean = attention_rank_memory(SHAPE, layers=2, tokens=10, live_units=3, rows_per_token=2, recompute="full")
    assert lean.activations == 3 * 10 * 2 * SHAPE.dim * 2


def test_live_units_of_known_schedules() -> None:
    assert [live_units_1f1b(pp=4, stage=i) for i in range(4)] == [4, 3, 2, 1]
    assert live_units_1f1b(pp=4, stage=0, micro_batches=2) == 2
    # papers.md 1.6: p = 2, v = 4: 19 and 17 at G = 2p, 31 and 29 at 4p (8 layers: the head makes it one chunk more)
    for g, first in ((4, 19), (8, 31)):
        got = live_units_af(num_layers=7, pa=2, pf=2, role="attention", cycle=g, micro_batches=8 * g)
        assert got == first
    with pytest.raises(ConfigError, match="cycle=3"):
        live_units_af(num_layers=8, pa=2, pf=2, role="ffn", cycle=3, micro_batches=8)


def test_the_peak_of_a_rank_follows_its_own_loads() -> None:
    """Two layers, one micro-batch each, added up by hand; a rank that gets all tokens needs more than one that gets none."""
    shape = ModelShape(name="x", num_layers=2, dim=4, num_heads=1, num_experts=4, top_k=2, expert_dim=8)
    order = [("F", 0, 0), ("F", 1, 0), ("B", 1, 0), ("B", 0, 0)]

    def peak(first: int, second: int) -> float:
        loads = {(0, 0): (first, first), (1, 0): (second, second)}
        return expert_rank_peak(shape, layers=2, experts=2, order=order, loads=loads)  # type: ignore[arg-type]

    params = 2 * 3 * 4 * 8
    assert peak(0, 0) == 2 * params * 12 + 2 * params * 4  # at the end: both gradients
    # 100 rows, 100 pairs each: x, H, gates and ids; then dH, A', the wire (combine, d_dispatch and dy twice)
    kept = (100 * 4 + 100 * 16) * 4 + 100 * 2 * 4 + (100 + 200 + 3) * 4
    at_first_backward = 2 * kept + 100 * 4 * 4 * 3 + 100 * 24 * 4
    assert peak(100, 100) == 2 * params * 12 + at_first_backward
    assert peak(200, 0) > peak(0, 0)
