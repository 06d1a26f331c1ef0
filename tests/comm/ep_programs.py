"""Programs of the expert-parallel tests. No hypothesis or pytest here: gloo processes import this module."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchmoe import FusedExpertMLP, MoELayer, Routing, TopKRouter
from torchmoe.comm.all_to_all import AllToAllExchange
from torchmoe.placement import contiguous_owners
from torchmoe.testing.ranks import RankContext

DIM, HIDDEN = 6, 5

Case = dict[str, Any]

SAMPLE: Case = {
    "tokens": [5, 0, 7],
    "experts": 7,
    "top_k": 2,
    "seed": 3,
    "drop": True,
    "idle": False,
    "capacity": 4,
    "dtype": torch.float64,
}


def flat(ctx: RankContext, **options: Any) -> AllToAllExchange:
    ranks = options.get("ranks", range(ctx.world))
    return AllToAllExchange(ctx.transport(AllToAllExchange.communicators(ranks)), **options)


def random_routing(case: Case) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, ids, gates, dy of all ranks' tokens."""
    g = torch.Generator().manual_seed(case["seed"])
    t, e, k = sum(case["tokens"]), case["experts"], case["top_k"]
    scores = torch.rand(t, e, generator=g)
    if case["idle"]:
        scores[:, : max(0, e - k)] -= 1  # everything goes to the last K experts
    ids = scores.topk(k, dim=1).indices if t else torch.zeros(0, k, dtype=torch.long)
    if case["drop"]:
        ids = torch.where(torch.rand(t, k, generator=g) < 0.3, -1, ids)
    x, dy = (torch.randn(t, DIM, generator=g, dtype=torch.float64) for _ in range(2))
    return x, ids, torch.rand(t, k, generator=g, dtype=torch.float64), dy


def build_experts(case: Case, ids: tuple[int, ...]) -> FusedExpertMLP:
    g = torch.Generator().manual_seed(case["seed"] + 1)
    e, dtype = case["experts"], case["dtype"]
    shapes = {"w1_EFD": (e, HIDDEN, DIM), "w2_EDF": (e, DIM, HIDDEN), "w3_EFD": (e, HIDDEN, DIM)}
    full = {n: torch.randn(s, generator=g, dtype=torch.float64).to(dtype) for n, s in shapes.items()}
    local = {n: torch.nn.Parameter(w[list(ids)].clone()) for n, w in full.items()}
    return FusedExpertMLP.from_parameters(local["w1_EFD"], local["w2_EDF"], local["w3_EFD"], backend="reference")


class Fixed(torch.nn.Module):
    """A router that says what it was told."""

    def __init__(self, ids: Tensor, gates: Tensor) -> None:
        super().__init__()
        self.ids, self.gates = ids, torch.nn.Parameter(gates)

    def forward(self, x_TD: Tensor, **_: Any) -> Routing:
        return Routing(self.ids, self.gates)


def expert_parallel(ctx: RankContext, case: Case) -> tuple[Tensor, dict[str, Tensor]]:
    x, ids, gates, dy = random_routing(case)
    start = sum(case["tokens"][: ctx.rank])
    mine = slice(start, start + case["tokens"][ctx.rank])
    exchange = flat(ctx, num_experts=case["experts"])
    layer = MoELayer(
        Fixed(ids[mine], gates[mine].float() if case["dtype"] != torch.float64 else gates[mine].clone()),
        build_experts(case, exchange.local_experts),
        capacity=case["capacity"],
        exchange=exchange,
    )
    return run_layer(layer, x[mine].to(case["dtype"]), dy[mine].to(case["dtype"]))


def all_dtypes(ctx: RankContext, case: Case, dtypes: tuple[torch.dtype, ...]) -> list[tuple[Tensor, dict[str, Tensor]]]:
    """:func:`expert_parallel` once for each dtype."""
    return [expert_parallel(ctx, {**case, "dtype": dtype}) for dtype in dtypes]


def run_layer(layer: MoELayer, x: Tensor, dy: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    x = x.clone().requires_grad_()
    y, _ = layer(x)
    y.backward(dy)
    grads = {n: p.grad for n, p in layer.named_parameters()} | {"x": x.grad}
    assert all(g is not None for g in grads.values())
    return y.detach(), {n: g.detach().clone() for n, g in grads.items() if g is not None}


def one_device(case: Case) -> tuple[Tensor, dict[str, Tensor]]:
    x, ids, gates, dy = random_routing(case)
    dtype = case["dtype"]
    if dtype != torch.float64:
        x, dy, gates = x.to(dtype).double(), dy.to(dtype).double(), gates.float().double()
    experts = build_experts(case, tuple(range(case["experts"])))
    experts = experts.double() if dtype != torch.float64 else experts
    return run_layer(MoELayer(Fixed(ids, gates), experts, capacity=case["capacity"]), x, dy)


def on_meshes(ctx: RankContext) -> tuple[Tensor, Tensor, int]:
    """2 replicas x 2 expert-parallel ranks, from a 2-D DeviceMesh."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    g = torch.Generator().manual_seed(1)
    router = TopKRouter(DIM, 5, 2, dtype=torch.float64)
    router.weight_ED.data.copy_(torch.randn(5, DIM, generator=g, dtype=torch.float64))
    case = {**SAMPLE, "experts": 5, "dtype": torch.float64}
    owned = tuple(e for e, o in enumerate(contiguous_owners(5, 2)) if o == mesh["ep"].get_local_rank())
    layer = MoELayer(router, build_experts(case, owned), ep_mesh=mesh["ep"])
    x = torch.randn(4, 3, DIM, generator=g, dtype=torch.float64)[ctx.rank]
    y, _ = layer(x)
    whole = MoELayer(router, build_experts(case, tuple(range(5))))
    return y.detach(), whole(x)[0].detach(), len(layer.experts.w1_EFD)
