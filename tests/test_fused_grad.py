"""FusedExpertMLP(fused_grad=True): weight gradients are added to fp32 .grad by the backward itself."""

from __future__ import annotations

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from tests.experts_kit import experts, inputs, run, split_grads, truth
from torchmoe.dispatch import DispatchQueue
from torchmoe.errors import ConfigError
from torchmoe.testing import oracle


@pytest.mark.parametrize("layout", ["split", "concat", "interleaved"])
@pytest.mark.parametrize(("save", "chunk"), [("input", None), ("half", None), ("preact", 5), ("all", None)])
def test_one_micro_batch_has_the_bits_of_the_plain_form(layout: str, save: str, chunk: int | None) -> None:
    ids = torch.randint(-1, 7, (23, 3), generator=torch.Generator().manual_seed(0))
    results = []
    for fused in (False, True):
        module = experts(7, 6, 5, bias=True, save=save, chunk_tokens=chunk, layout=layout, fused_grad=fused)
        results.append(run(module, ids, *inputs(ids, 6, torch.float32)))
    for name, value in results[0].items():
        assert torch.equal(value, results[1][name]), name


def test_micro_batches_of_bf16_weights_add_up_in_fp32() -> None:
    ids = torch.randint(-1, 3, (40, 2), generator=torch.Generator().manual_seed(0))
    module = experts(3, 16, 8, dtype=torch.bfloat16, fused_grad=True)
    want: dict[str, torch.Tensor] = {}
    for seed in range(6):
        x, gates, dy = inputs(ids, 16, torch.bfloat16, seed=seed)
        module(x, DispatchQueue.build(ids, 3), gates).backward(dy)
        for name, grad in truth(module, ids, x, gates, dy).items():
            want[name] = want[name] + grad if name in want else grad
    for name, grad in split_grads(module).items():
        assert grad.dtype == torch.float32 and oracle.relative_error(grad, want[name]) < 5e-3, name


def test_a_second_micro_batch_allocates_no_weight_gradient() -> None:
    """What the plain form allocates anew for every micro-batch."""
    ids = torch.randint(0, 2, (16, 1), generator=torch.Generator().manual_seed(0))
    largest = {}
    for fused in (False, True):
        module = experts(2, 96, 128, fused_grad=fused)
        x, gates, dy = inputs(ids, 96, torch.float32)
        queue = DispatchQueue.build(ids, 2)
        module(x, queue, gates).backward(dy)
        y = module(x, queue, gates)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
            y.backward(dy)
        sizes = [e.nbytes() for e in prof.profiler.kineto_results.events() if e.name() == "[memory]"]  # type: ignore[union-attr]
        largest[fused] = max(sizes)
    weight = 2 * 96 * 128 * 4
    assert largest[False] == weight and largest[True] < weight


def test_frozen_inputs_and_weights() -> None:
    """The weights' gradients arrive where neither x nor the gates need one; frozen weights get none."""
    ids = torch.randint(0, 3, (9, 2), generator=torch.Generator().manual_seed(0))
    module = experts(3, 6, 5, dtype=torch.float64, fused_grad=True)
    module.w2_EDF.requires_grad_(False)
    x, gates, dy = inputs(ids, 6, torch.float64, grad=False)
    module(x, DispatchQueue.build(ids, 3), gates).backward(dy)
    want = truth(module, ids, x, gates, dy)
    assert module.w2_EDF.grad is None and module.w1_EFD.grad is not None
    assert oracle.relative_error(module.w1_EFD.grad, want["w1"]) < 1e-12


def test_autocast_and_checkpointing_work() -> None:
    ids = torch.randint(0, 3, (9, 2), generator=torch.Generator().manual_seed(0))
    module = experts(3, 6, 5, fused_grad=True)
    grads = []
    for recompute in (False, True):
        module.zero_grad()
        x, gates, _ = inputs(ids, 6, torch.float32)
        queue = DispatchQueue.build(ids, 3)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = checkpoint(module, x, queue, gates, use_reentrant=False) if recompute else module(x, queue, gates)
        assert y.dtype == torch.bfloat16
        y.float().sum().backward()
        assert x.grad is not None and x.grad.dtype == torch.float32
        grads.append(split_grads(module))
    for name, grad in grads[0].items():
        assert grad.dtype == torch.float32 and grad.any() and torch.equal(grad, grads[1][name]), name


def test_compilation_is_refused() -> None:
    module = experts(3, 6, 5, fused_grad=True)
    ids = torch.zeros(4, 1, dtype=torch.long)
    x, gates, _ = inputs(ids, 6, torch.float32)
    with pytest.raises((ConfigError, torch._dynamo.exc.Unsupported), match="fused_grad=True"):
        torch.compile(module, fullgraph=True, backend="eager")(x, DispatchQueue.build(ids, 3), gates)
