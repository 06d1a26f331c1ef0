"""The registered operators under opcheck, torch.compile, checkpointing and FSDP2's conditions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo.utils
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.experts_kit import experts, inputs
from torchmoe.dispatch import DispatchQueue
from torchmoe.errors import ConfigError
from torchmoe.kernels import ops
from torchmoe.layer import MoELayer
from torchmoe.recompute import save_routing
from torchmoe.router import TopKRouter

IDS = torch.tensor([[0, 2], [1, 3], [2, 0], [1, 2], [3, 1]])
OPS = torch.ops.torchmoe


def call_arguments(save: str, *, chunk: int = 0, activation: str = "swiglu", layout: str = "split") -> tuple[Any, ...]:
    module = experts(4, 6, 8, bias=True, activation=activation, layout=layout)
    x, gates, _ = inputs(IDS, 6, torch.float32)
    queue = DispatchQueue.build(IDS, 4)
    return (
        x,
        gates,
        *queue.index,
        queue.token_expert_indices if chunk else None,
        *module.weights(),
        activation,
        layout,
        save,
        chunk,
        "reference",
    )


@pytest.mark.parametrize(("save", "chunk"), [("input", 0), ("half", 0), ("preact", 0), ("all", 0), ("preact", 2)])
def test_expert_mlp_passes_opcheck(save: str, chunk: int) -> None:
    torch.library.opcheck(OPS.expert_mlp.default, call_arguments(save, chunk=chunk))


def test_the_other_operators_pass_opcheck() -> None:
    queue = DispatchQueue.build(IDS, 4)
    x, gates, dy = inputs(IDS, 6, torch.float32)
    torch.library.opcheck(OPS.build_queue.default, (IDS, 4, None, "reference"))
    torch.library.opcheck(OPS.build_queue.default, (IDS, 4, 12, "reference"))
    torch.library.opcheck(OPS.gather.default, (x, *queue.index))
    rows = torch.randn(queue.num_rows, 6, requires_grad=True)
    torch.library.opcheck(OPS.combine.default, (rows, gates, *queue.index))
    torch.library.opcheck(OPS.combine.default, (rows, None, *queue.index))
    pairs = DispatchQueue.from_pairs(torch.tensor([2, 0, 2]), torch.tensor([0, 1, 3]), 3, 4)
    torch.library.opcheck(OPS.combine.default, (torch.randn(3, 6, requires_grad=True), torch.rand(3), *pairs.index))
    forward = call_arguments("preact")
    _, gate, up, _ = OPS.expert_mlp.default(*forward)
    x0, gates0, tokens, offsets, index_map, token_offsets, expert_indices, *weights = (
        t.detach() if isinstance(t, Tensor) else t for t in forward[:13]
    )
    backward = (
        dy,
        x0,
        gates0,
        tokens,
        offsets,
        index_map,
        token_offsets,
        expert_indices,
        *weights,
        gate.detach(),
        up.detach(),
        None,
    )
    torch.library.opcheck(OPS.expert_mlp_backward.default, (*backward, [True] * 8, "swiglu", "split", "preact", 0, "reference"))


def layer(**options: Any) -> MoELayer:
    torch.manual_seed(0)
    return MoELayer(TopKRouter(16, 8, 2, sequence_loss=0.1), experts(8, 16, 24, **options))


@pytest.mark.parametrize(("save", "chunk"), [("preact", None), ("input", 32)])
def test_the_layer_compiles_whole_with_at_most_two_recompiles_over_ten_token_counts(save: str, chunk: int | None) -> None:
    """shawntan/scattermoe#12, PrimeIntellect-ai/prime-rl#996, pytorch/torchtitan PR#1365: no graph break from the routing."""
    torch._dynamo.reset()
    module = layer(save=save, chunk_tokens=chunk)
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend="aot_eager")
    for T in (64, 65, 1000, 7, 3, 128, 250, 2, 1, 500):
        x = torch.randn(T, 16, requires_grad=True)
        results = []
        for call in (compiled, module):
            module.zero_grad()
            x.grad = None
            y, routing = call(x)
            (y.square().sum() + routing.aux).backward()
            results.append([y.detach(), x.grad.clone(), *(p.grad.clone() for p in module.parameters())])
        for got, want in zip(*results, strict=True):
            assert (got - want).norm() <= 1e-5 * want.norm()
    assert 1 <= torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 3


def test_inductor_compiles_the_layer() -> None:
    torch._dynamo.reset()
    module = layer()
    x = torch.randn(33, 16, requires_grad=True)
    y, _ = torch.compile(module, fullgraph=True)(x)
    y.sum().backward()
    want, _ = module(x)
    assert (y - want).norm() < 1e-5 * want.norm()


class Flipping(TopKRouter):
    """A router whose logits are exact ties, broken the other way at every call: the worst case of recomputation."""

    calls = 0

    def logits(self, x_TD: Tensor) -> Tensor:
        self.calls += 1
        tilt = torch.linspace(0, 1e-6, self.num_experts) * (1 if self.calls % 2 else -1)
        return super().logits(x_TD) * 0 + tilt + 1.0


def flipping_layer() -> MoELayer:
    torch.manual_seed(0)
    return MoELayer(Flipping(16, 8, 2), experts(8, 16, 24))


def gradients(module: MoELayer, x: Tensor, **options: Any) -> list[Tensor]:
    module.zero_grad()
    y, _ = checkpoint(module, x, use_reentrant=False, **options) if options.pop("recompute", True) else module(x)
    y.square().sum().backward()
    return [p.grad.clone() for p in module.experts.parameters() if p.grad is not None]


def test_recomputation_under_the_policy_replays_the_routing() -> None:
    """NVIDIA-NeMo/Automodel PR#2635, pytorch/torchtitan#1117, pytorch/pytorch#171355: ties flip when recomputed."""
    x = torch.randn(12, 16)
    plain = gradients(flipping_layer(), x, recompute=False)
    kept = gradients(flipping_layer(), x, context_fn=save_routing)
    for got, want in zip(kept, plain, strict=True):
        # The tilt of 1e-6 is in the recomputed gates; another routing would be an error of order 1.
        assert (got - want).norm() < 1e-4 * want.norm()


def test_plain_checkpointing_raises_no_error_when_the_routing_flips() -> None:
    """Shapes never depend on the routing. (The gradients then follow the other routing: that is what the policy is for.)"""
    x = torch.randn(12, 16)
    flipped = gradients(flipping_layer(), x)
    plain = gradients(flipping_layer(), x, recompute=False)
    assert all(g.isfinite().all() for g in flipped)
    assert any((a - b).norm() > 0.1 * b.norm() for a, b in zip(flipped, plain, strict=True))


def test_autocast_inside_recomputation_keeps_the_dtype() -> None:
    """pytorch/pytorch#148831: the recomputed H has the forward's dtype, so the gradients are the bits of a plain run."""
    module = layer()
    x = torch.randn(12, 16, requires_grad=True)
    grads = []
    for recompute in (False, True):
        module.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y, _ = checkpoint(module, x, use_reentrant=False) if recompute else module(x)
        assert y.dtype == torch.bfloat16
        y.float().sum().backward()
        grads.append([p.grad.clone() for p in module.parameters() if p.grad is not None])
    for got, want in zip(*grads, strict=True):
        assert torch.equal(got, want)


def test_second_derivatives_are_refused_not_wrong() -> None:
    module = experts(4, 6, 8)
    x, gates, _ = inputs(IDS, 6, torch.float32)
    (dx,) = torch.autograd.grad(module(x, DispatchQueue.build(IDS, 4), gates).sum(), x, create_graph=True)
    with pytest.raises(ConfigError, match="no second derivative"):
        dx.sum().backward()


def test_forward_mode_is_refused_not_silently_zero() -> None:
    """torch.func.jvp gave the part of the tangent that goes through the gates, without an error."""
    module, x = MoELayer(TopKRouter(6, 4, 2), experts(4, 6, 8)), torch.randn(5, 6)
    queue = DispatchQueue.build(torch.tensor([[0, 1]] * 5), 4)
    for call in (lambda t: module(t)[0], queue.gather, lambda t: queue.combine(t.repeat(2, 1))):
        with pytest.raises(ConfigError, match="no forward-mode derivative"):
            torch.func.jvp(call, (x,), (x,))


def test_nothing_is_read_after_the_call_returned() -> None:
    """pytorch/torchtitan PR#2247 (NaN with offload): overwriting the inputs after backward changes no result."""
    module = experts(4, 6, 8)
    x, gates, dy = inputs(IDS, 6, torch.float32)
    y = module(x, DispatchQueue.build(IDS, 4), gates)
    y.backward(dy)
    before = [p.grad.clone() for p in module.parameters() if p.grad is not None]
    with torch.no_grad():
        for t in (x, gates, dy, *module.parameters()):
            t.fill_(float("nan"))
    for p, want in zip(module.parameters(), before, strict=True):
        assert p.grad is not None and torch.equal(p.grad, want)


def test_ops_are_reached_through_one_door() -> None:
    assert set(ops.__all__) >= {"build_queue", "combine", "expert_mlp", "gather"}
    for name in ("build_queue", "combine", "expert_mlp", "expert_mlp_backward", "gather"):
        assert hasattr(OPS, name)
