"""What the expert block keeps between forward and backward, counted in two independent ways, against the formula of costs."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from tests.experts_kit import experts, inputs, run
from torchmoe.dispatch import DispatchQueue
from torchmoe.experts import FusedExpertMLP

E, D, F, K, T = 5, 24, 16, 3, 41
CASES = [
    (activation, save, chunk, dtype)
    for activation, save, chunk, dtype in itertools.product(
        ("swiglu", "gelu"), ("input", "half", "preact", "all"), (None, 16), (torch.float32, torch.bfloat16, torch.float64)
    )
    if not (activation == "gelu" and save == "half")
]


def unique_bytes(tensors: list[Tensor]) -> int:
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.numel()}.values())


def allocated(call: Callable[[], Any]) -> tuple[int, Any]:
    """Bytes allocated and still alive when ``call`` returns, as the CPU allocator reports them: nothing can hide from it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        result = call()
    events = prof.profiler.kineto_results.events()  # type: ignore[union-attr]
    return sum(e.nbytes() for e in events if e.name() == "[memory]"), result


@pytest.mark.parametrize(("activation", "save", "chunk", "dtype"), CASES)
def test_saved_tensors_are_the_formula_byte_for_byte(activation: str, save: str, chunk: int | None, dtype: torch.dtype) -> None:
    """kernels.md 3: saved_tensors_hooks over unique storages, weights excluded."""
    module = experts(E, D, F, activation=activation, save=save, chunk_tokens=chunk, dtype=dtype, bias=True)
    ids = torch.randint(-1, E, (T, K), generator=torch.Generator().manual_seed(0))
    x, gates, _ = inputs(ids, D, dtype)
    queue = DispatchQueue.build(ids, E)
    weights = {p.untyped_storage().data_ptr() for p in module.parameters()}
    kept: list[Tensor] = []

    def pack(t: Tensor) -> Tensor:
        if t.untyped_storage().data_ptr() not in weights:
            kept.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        module(x, queue, gates)
    want = module.costs(K).saved_bytes(T, save, chunked=chunk is not None)
    assert unique_bytes(kept) == want == module.plan(T, top_k=K).saved_bytes


@pytest.mark.parametrize(("activation", "save", "chunk", "dtype"), CASES)
def test_nothing_else_stays_alive(activation: str, save: str, chunk: int | None, dtype: torch.dtype) -> None:
    """Live-storage audit: what the forward leaves allocated is y and the hidden tensors, nothing in ctx, closures or caches."""
    module = experts(E, D, F, activation=activation, save=save, chunk_tokens=chunk, dtype=dtype, bias=True)
    ids = torch.randint(-1, E, (T, K), generator=torch.Generator().manual_seed(0))
    x, gates, dy = inputs(ids, D, dtype)
    queue = DispatchQueue.build(ids, E)
    run(module, ids, x, gates, dy)  # libraries allocate workspaces at first use
    costs = module.costs(K)
    alive, y = allocated(lambda: module(x, queue, gates))
    hidden = T * K * costs.saved_hidden_columns(save) * dtype.itemsize
    assert alive == hidden + y.untyped_storage().nbytes()


def test_with_frozen_projections_x_is_not_kept() -> None:
    """dgates and dx need H and the weights only."""
    module = experts(E, D, F)
    module.w1_EFD.requires_grad_(False)
    module.w3_EFD.requires_grad_(False)
    ids = torch.randint(0, E, (T, K), generator=torch.Generator().manual_seed(0))
    x, gates, _ = inputs(ids, D, torch.float32)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
        module(x, DispatchQueue.build(ids, E), gates)
    assert all(t.data_ptr() != x.data_ptr() for t in kept)


@pytest.mark.parametrize("save", ["input", "half", "preact", "all"])
def test_split_form_keeps_the_same_bytes_and_weight_work_what_it_says(save: str) -> None:
    module = experts(E, D, F, save=save)
    ids = torch.randint(0, E, (T, K), generator=torch.Generator().manual_seed(0))
    x, gates, dy = inputs(ids, D, torch.float32, grad=False)
    queue = DispatchQueue.build(ids, E)
    _, saved = module.forward_saved(x, queue, gates)
    assert unique_bytes(saved.tensors()) == module.costs(K).saved_bytes(T, save)
    _, _, work = module.backward_input(saved, dy)
    # gates_P is a view of one element more than P: the bin of dropped slots.
    assert unique_bytes(work.tensors()) - 4 == module.costs(K).weight_work_bytes(T)
    work.run()
    assert work.tensors() == []


def test_inference_keeps_nothing() -> None:
    module = experts(E, D, F)
    ids = torch.randint(0, E, (T, K))
    x, gates, _ = inputs(ids, D, torch.float32, grad=False)
    queue = DispatchQueue.build(ids, E)
    with torch.no_grad():
        module(x, queue, gates)
        alive, y = allocated(lambda: module(x, queue, gates))
    assert alive == y.untyped_storage().nbytes()


def test_auto_takes_the_richest_mode_that_fits() -> None:
    ids = torch.randint(0, E, (T, K))
    x, gates, _ = inputs(ids, D, torch.float32)
    costs = experts(E, D, F).costs(K)
    for mode in ("input", "half", "preact", "all"):
        budget = costs.saved_bytes(T, mode)
        module = FusedExpertMLP(E, D, F, save="auto", save_budget=budget)
        assert module.plan(T, top_k=K).save == mode
        queue = DispatchQueue.build(ids, E)
        alive, y = allocated(lambda m=module, q=queue: m(x, q, gates))
        assert alive - y.untyped_storage().nbytes() == T * K * costs.saved_hidden_columns(mode) * 4
        assert module.plan(T, top_k=K).saved_bytes <= budget
    assert FusedExpertMLP(E, D, F, save="auto", save_budget=0).plan(T, top_k=K).save == "input"
    assert FusedExpertMLP(E, D, F, activation="gelu", save="auto", save_budget=10**9).plan(T, top_k=K).save == "all"


def test_no_routed_copy_of_x_or_dy_exists_at_any_moment() -> None:
    """Levels L0 to L2 of kernels.md, section 0: with K = 8 the largest single allocation is Y or dX~, and they are freed."""
    big_t, k, d, f = 256, 8, 64, 16
    module = experts(E, d, f)
    ids = torch.stack([torch.randperm(E)[:4] for _ in range(big_t)]).repeat(1, 2)
    x, gates, dy = inputs(ids, d, torch.float32)
    queue = DispatchQueue.build(ids, E)

    def step() -> None:
        module(x, queue, gates).backward(dy)

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        step()
    sizes = [e.nbytes() for e in prof.profiler.kineto_results.events() if e.name() == "[memory]"]  # type: ignore[union-attr]
    routed = big_t * k * d * 4
    # Exactly two tensors of [P, D] are ever allocated: Y in the forward and dX~ in the backward.
    assert sum(s == routed for s in sizes) == 2 and max(sizes) == routed
    assert sum(s == -routed for s in sizes) == 2


def test_transients_of_the_plan_bound_what_is_allocated() -> None:
    """The peak of a forward and of a backward, measured at the allocator, stays within the plan's figures."""
    big_t, k = 3000, 2
    ids = torch.stack([torch.randperm(E)[:k] for _ in range(big_t)])
    for chunk in (None, 512):
        module = experts(E, D, F, chunk_tokens=chunk)
        x, gates, dy = inputs(ids, D, torch.float32)
        queue = DispatchQueue.build(ids, E)
        plan = module.plan(big_t, top_k=k)
        module(x, queue, gates).backward(dy)
        for p in (x, gates, *module.parameters()):
            p.grad = None
        peaks = []
        y = None
        for _ in range(2):
            with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
                if y is None:
                    y = module(x, queue, gates)
                else:
                    y.backward(dy)
            live = peak = 0
            for e in prof.profiler.kineto_results.events():  # type: ignore[union-attr]
                if e.name() == "[memory]":
                    live += e.nbytes()
                    peak = max(peak, live)
            peaks.append(peak)
        hidden = big_t * k * module.costs(k).saved_hidden_columns("preact") * 4
        index = 64 * big_t * k  # index arithmetic of the combine, in int64
        forward = hidden + 2 * big_t * D * 4 + plan.forward_transient_bytes + index
        backward = 2 * big_t * D * 4 + plan.backward_transient_bytes + plan.weight_gradient_bytes + index
        assert peaks[0] <= forward and peaks[1] <= backward, (chunk, peaks, forward, backward)
        assert peaks[0] > hidden


def test_explain_prints_the_figures_of_the_plan() -> None:
    plan = experts(E, D, F, chunk_tokens=16).plan(T, top_k=K)
    text = plan.explain()
    for figure in (plan.saved_bytes, plan.forward_transient_bytes, plan.backward_transient_bytes, plan.weight_gradient_bytes):
        assert f"{figure:,}" in text
    assert f"{plan.costs.forward_flops(T):.4g}" in text and "chunks of 16 tokens" in text


def test_explain_names_the_tiles_of_the_backend() -> None:
    assert "blocks: at most 512 rows" in experts(E, D, F).plan(T, top_k=K).explain()
    pytest.importorskip("triton", reason="the Triton backend needs triton; pip install 'torchmoe[triton]'")
    text = experts(E, D, F, backend="triton").plan(T, top_k=K).explain()
    assert "up_projection: tile" in text and "weight_grad: tile" in text and "triton backend" in text
