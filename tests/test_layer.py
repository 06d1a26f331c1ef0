"""MoELayer: shapes, shared expert, capacity, given routings; weights sharded by FSDP2."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.experts_kit import experts
from torchmoe.dispatch import DispatchQueue
from torchmoe.errors import ConfigError
from torchmoe.experts import FusedExpertMLP, RankExperts
from torchmoe.layer import MoELayer
from torchmoe.router import Routing, TopKRouter


def layer(E: int = 4, **options: Any) -> MoELayer:
    torch.manual_seed(0)
    return MoELayer(TopKRouter(8, E, min(2, E)), experts(E, 8, 6), **options)


def test_leading_dimensions_and_the_shared_expert() -> None:
    shared = nn.Linear(8, 8)
    both, routed = layer(shared=shared), layer()
    x = torch.randn(2, 3, 8)
    y, routing = both(x)
    assert y.shape == x.shape and routing.expert_ids_TK.shape == (6, 2)
    assert torch.allclose(y, routed(x)[0] + shared(x), atol=1e-6)


def test_a_routing_decided_elsewhere_is_used_as_it_is() -> None:
    module = layer()
    x = torch.randn(5, 8)
    _, routing = module(x)
    moved = Routing((routing.expert_ids_TK + 1) % 4, routing.gates_TK)
    y, same = module(x, routing=moved)
    assert same is moved and not torch.allclose(y, module(x)[0])


def test_capacity_drops_the_last_rows_of_an_expert_and_keeps_the_gates() -> None:
    module = layer(capacity=2)
    x = torch.randn(5, 8)
    ids = torch.tensor([[0, 1]] * 5)
    y, _ = module(x, routing=Routing(ids, torch.full((5, 2), 0.5)))
    free = layer()
    want, _ = free(x, routing=Routing(ids, torch.full((5, 2), 0.5)))
    assert torch.allclose(y[:2], want[:2], atol=1e-6) and not y[2:].any()


@pytest.mark.parametrize("capacity", [1.25, -1, True])
def test_a_capacity_that_counts_no_rows_is_refused_at_once(capacity: Any) -> None:
    with pytest.raises(ConfigError, match=f"capacity={capacity} must be a whole number"):
        layer(capacity=capacity)


def test_built_and_called_on_meta_then_materialised() -> None:
    with torch.device("meta"):
        module = MoELayer(TopKRouter(8, 4, 2), FusedExpertMLP(4, 8, 6), capacity=3)
        stage = RankExperts(FusedExpertMLP(2, 8, 6), [1, 3], 4)
    y, routing = module(torch.empty(2, 5, 8, device="meta"))
    assert y.is_meta and y.shape == (2, 5, 8) and routing.expert_ids_TK.shape == (10, 2)
    for part in (module, stage.experts):
        part.to_empty(device="cpu")
        for child in part.modules():
            if isinstance(child, TopKRouter | FusedExpertMLP):
                child.reset_parameters()
    assert module(torch.randn(5, 8))[0].isfinite().all()
    assert stage.local_ids(torch.tensor([[0, 1], [3, -1]])).tolist() == [[-1, 0], [1, -1]]


def test_export_with_any_number_of_tokens() -> None:
    module, tokens = layer(), torch.export.Dim("tokens", min=2, max=100)
    program = torch.export.export(module, (torch.randn(7, 8),), dynamic_shapes={"x": {0: tokens}}).module()
    x = torch.randn(13, 8)
    (y, routing), (want, decided) = program(x), module(x)
    torch.testing.assert_close(y, want)
    assert isinstance(routing, Routing) and torch.equal(routing.expert_ids_TK, decided.expert_ids_TK)


def test_vmap_equals_a_loop() -> None:
    module, x = layer(), torch.randn(3, 5, 8)
    torch.func.vmap(lambda t: module(t)[0])(x).square().sum().backward()
    got = [p.grad for p in module.parameters()]
    module.zero_grad()
    sum(module(t)[0].square().sum() for t in x).backward()  # type: ignore[union-attr]
    for g, p in zip(got, module.parameters(), strict=True):
        torch.testing.assert_close(g, p.grad)


def test_router_and_experts_of_different_layers_are_refused() -> None:
    with pytest.raises(ConfigError, match="build both for one layer"):
        MoELayer(TopKRouter(8, 5, 2), experts(4, 8, 6))


def test_every_expert_that_received_tokens_trains() -> None:
    """pytorch/pytorch#153354, NVIDIA/Megatron-LM#6600: experts silently left out of the step."""
    module = layer(E=6)
    before = {n: p.detach().clone() for n, p in module.named_parameters()}
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    y, routing = module(torch.randn(30, 8))
    y.square().sum().backward()
    optimizer.step()
    hit = set(routing.expert_ids_TK.unique().tolist())
    for name, p in module.experts.named_parameters():
        for e in range(6):
            assert torch.equal(p[e], before[f"experts.{name}"][e]) == (e not in hit)


def sharded(rank: int, port: int, folder: str) -> None:
    """Two ranks: FSDP2 over 4 experts on dim 0, and over ONE expert on dim 1 (E below the world size)."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    for E in (4, 1):
        module = layer(E)
        fully_shard(module, mesh=mesh, shard_placement_fn=lambda p, d=0 if E == 4 else 1: Shard(d if p.ndim == 3 else 0))
        x = torch.randn(6, 8, generator=torch.Generator().manual_seed(rank))
        y, _ = module(x)
        y.square().sum().backward()
        grads = {n: p.grad.full_tensor() for n, p in module.named_parameters() if p.grad is not None}
        torch.save({"y": y.detach(), "grads": grads}, f"{folder}/{E}.{rank}.pt")
    torch.save(expert_parallel_weights(mesh, rank), f"{folder}/dtensor.{rank}.pt")
    apart = layer(4)
    fully_shard(apart.experts, mesh=mesh)
    fully_shard(apart, mesh=mesh)
    assert torch.equal(apart(x)[0], layer(4)(x)[0])
    weights = [nn.Parameter(distribute_tensor(torch.randn(4, *s), mesh, [Shard(d)])) for s, d in (((6, 8), 1), ((8, 6), 2))]
    with pytest.raises(ConfigError, match="an expert must be whole on its rank"):
        FusedExpertMLP.from_parameters(*weights, nn.Parameter(weights[0].detach().clone())).weights()
    dist.destroy_process_group()


def expert_parallel_weights(mesh: DeviceMesh, rank: int) -> list[float]:
    """Errors of a module over DTensor weights (2 of 4 experts on this rank) against one over the same plain weights."""
    whole = experts(4, 8, 6)
    sources = (whole.w1_EFD, whole.w2_EDF, whole.w3_EFD)
    module = FusedExpertMLP.from_parameters(*(nn.Parameter(distribute_tensor(w.detach(), mesh, [Shard(0)])) for w in sources))
    plain = FusedExpertMLP.from_parameters(*(nn.Parameter(w.detach()[2 * rank : 2 * rank + 2].clone()) for w in sources))
    ids = torch.randint(-1, 2, (9, 2), generator=torch.Generator().manual_seed(rank))
    x, gates = torch.randn(9, 8), torch.rand(9, 2)
    queue, errors = DispatchQueue.build(ids, 2), []
    for split_form in (False, True):
        results = []
        for m in (module, plain):
            m.zero_grad()
            if split_form:
                y, saved = m.forward_saved(x, queue, gates)
                m.backward_input(saved, y)[2].run()
            else:
                y = m(x, queue, gates)
                y.backward(y.detach())
            grads = [p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in m.parameters()]
            results.append([y.detach(), *grads])
        errors += [float((a - b).norm() / b.norm()) for a, b in zip(*results, strict=True)]
    return errors


def test_sharded_weights_give_the_gradients_of_one_device(tmp_path: Path) -> None:
    """pytorch/torchtitan PR#1561, huggingface/transformers PR#45662, pytorch/pytorch#149396: E below the world size.

    FSDP2, and plain DTensor weights (pytorch/pytorch#153354, mixed Tensor and DTensor)."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    mp.spawn(sharded, args=(port, str(tmp_path)), nprocs=2)
    for rank in range(2):
        assert torch.load(tmp_path / f"dtensor.{rank}.pt") == [0.0] * 8  # y and three weights, autograd and split form
    for E in (4, 1):
        module = layer(E)
        total = torch.zeros(())
        for rank in range(2):
            x = torch.randn(6, 8, generator=torch.Generator().manual_seed(rank))
            y, _ = module(x)
            got = torch.load(tmp_path / f"{E}.{rank}.pt")
            assert torch.allclose(got["y"], y, atol=1e-6)
            total = total + y.square().sum() / 2
        total.backward()
        want = {n: p.grad for n, p in module.named_parameters()}
        for name, grad in got["grads"].items():
            assert (grad - want[name]).norm() <= 1e-5 * want[name].norm(), name
        assert got["grads"].keys() == {n for n, g in want.items() if g is not None}


def test_a_shared_expert_of_another_width_is_refused() -> None:
    layer = MoELayer(TopKRouter(4, 2, 1), FusedExpertMLP(2, 4, 8), shared=nn.Linear(4, 1))  # would broadcast
    with pytest.raises(ConfigError, match="check its width"):
        layer(torch.randn(3, 4))
