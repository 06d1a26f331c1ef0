"""Programs of the expert-parallel tests. No hypothesis or pytest here: gloo processes import this module."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from torchmoe import DispatchQueue, FusedExpertMLP, MoELayer, Routing, TopKRouter
from torchmoe.comm.all_to_all import AllToAllExchange
from torchmoe.comm.auto import AutoAllToAll
from torchmoe.comm.halo import HierarchicalAllToAll
from torchmoe.comm.links import Hop, LinkModel
from torchmoe.comm.token_exchange import TokenExchange
from torchmoe.comm.waves import overlapped
from torchmoe.errors import ExchangeError
from torchmoe.placement import Deadlines, contiguous_owners
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


def hierarchical(ctx: RankContext, lanes: int, **options: Any) -> HierarchicalAllToAll:
    transport = ctx.transport(HierarchicalAllToAll.communicators(range(ctx.world), lanes))
    return HierarchicalAllToAll(transport, lanes=lanes, **options)


def auto(ctx: RankContext, lanes: int, **options: Any) -> AutoAllToAll:
    return AutoAllToAll(ctx.transport(AutoAllToAll.communicators(range(ctx.world), lanes)), lanes=lanes, **options)


def auto_parallel(ctx: RankContext, lanes: int, case: Case) -> tuple[Any, dict[str, int], str]:
    """The layer over an automatic exchange that measures its links; with what it chose and what it measured."""
    exchange = auto(ctx, lanes, num_experts=case["experts"])
    return parallel(exchange, case), exchange.chosen, repr(exchange.links)


def my_tokens(case: Case, rank: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """:func:`random_routing` of one rank, in the case's dtype."""
    start = sum(case["tokens"][:rank])
    mine = slice(start, start + case["tokens"][rank])
    x, ids, gates, dy = (t[mine].clone() for t in random_routing(case))
    dtype = case["dtype"]
    return x.to(dtype), ids, gates if dtype == torch.float64 else gates.float(), dy.to(dtype)


def parallel(exchange: TokenExchange, case: Case) -> tuple[Tensor, dict[str, Tensor]]:
    x, ids, gates, dy = my_tokens(case, exchange.index)
    experts = build_experts(case, exchange.local_experts)
    layer = MoELayer(Fixed(ids, gates), experts, capacity=case["capacity"], exchange=exchange)
    return run_layer(layer, x, dy)


def expert_parallel(ctx: RankContext, case: Case) -> tuple[Tensor, dict[str, Tensor]]:
    return parallel(flat(ctx, num_experts=case["experts"]), case)


def hierarchical_parallel(ctx: RankContext, lanes: int, case: Case) -> tuple[Tensor, dict[str, Tensor]]:
    return parallel(hierarchical(ctx, lanes, num_experts=case["experts"]), case)


def on_node_mesh(ctx: RankContext, case: Case) -> tuple[Tensor, dict[str, Tensor]]:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "lane"))
    return parallel(HierarchicalAllToAll.from_mesh(mesh, num_experts=case["experts"]), case)


def overlapped_parallel(ctx: RankContext, lanes: int, case: Case) -> tuple[Tensor, dict[str, Tensor]]:
    exchange = hierarchical(ctx, lanes, num_experts=case["experts"])
    x, ids, gates, dy = my_tokens(case, ctx.rank)
    mlp = build_experts(case, exchange.local_experts)
    x.requires_grad_()
    gates.requires_grad_()

    def experts(rows: Tensor, ids: Tensor, gates: Tensor) -> Tensor:
        local = exchange.local_ids(ids)
        y: Tensor = mlp(rows, DispatchQueue.build(local, mlp.num_experts, backend="reference"), gates)
        return y

    y = overlapped(exchange, x, ids, gates, experts=experts, parameters=list(mlp.parameters()))
    y.backward(dy)
    grads = {f"experts.{n}": p.grad for n, p in mlp.named_parameters()} | {"x": x.grad, "router.gates": gates.grad}
    return y.detach(), {n: g for n, g in grads.items() if g is not None}


def both_forms(ctx: RankContext, lanes: int, case: Case) -> list[tuple[Tensor, dict[str, Tensor]]]:
    """The layer over a hierarchical exchange, and the overlapped form."""
    return [hierarchical_parallel(ctx, lanes, case), overlapped_parallel(ctx, lanes, case)]


def late(ctx: RankContext, lanes: int, collective: bool) -> str:
    """The last rank is late; returns what this one was told, and after how long."""
    exchange = hierarchical(ctx, lanes, collective=collective, deadlines=Deadlines(exchange=2.0))
    exchange.all_to_all(torch.ones(ctx.world, 2), [1] * ctx.world)
    ctx.barrier()
    if ctx.rank == ctx.world - 1:
        time.sleep(8.0)
        return "late"
    started = time.monotonic()
    try:
        exchange.all_to_all(torch.ones(ctx.world, 2), [1] * ctx.world)
    except ExchangeError as e:
        return f"{time.monotonic() - started:.1f} s: {e}"
    return "no error"


def other_rows(ctx: RankContext, lanes: int, what: str) -> None:
    """Rank 1 passes rows that the others do not expect. Without a check gloo ends the process that is sent too much."""
    options: dict[str, Any] = {"num_experts": 4, "deadlines": Deadlines(exchange=1.5)}
    exchange = auto(ctx, lanes, links=DEAR, **options) if lanes else flat(ctx, **options)
    x, ids, gates = torch.ones(4, DIM), torch.arange(4)[:, None], torch.ones(4, 1)
    if ctx.rank == 1:
        x = {"dtype": x.double(), "width": torch.ones(4, DIM + 2)}.get(what, x)
        if what == "k":
            ids, gates = ids.expand(4, 2), gates.expand(4, 2)
        if what == "gates":
            gates = gates.double()
        if what == "owners":
            exchange.own([1, 0, 2, 3] if ctx.world == 4 else [1, 0, 0, 1])
        if what == "call":
            exchange.all_to_all(x[: ctx.world], [1] * ctx.world)
    exchange.dispatch(x, ids, gates)


DEAR = LinkModel(between=Hop(0.0, 1e9, per_message=1.0), inside=Hop(0.0, 1e9))


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
