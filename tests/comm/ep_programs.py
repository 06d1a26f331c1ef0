"""Programs of the expert-parallel tests. No hypothesis or pytest here: gloo processes import this module."""

from __future__ import annotations

import pickle
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
from torchmoe.errors import ConfigError, ExchangeError
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


def copied_compiled_elsewhere(ctx: RankContext) -> None:
    """An expert-parallel layer under autocast, a copy of it, compiled, and built and called with another default device."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (ctx.world,), mesh_dim_names=("ep",))
    torch.manual_seed(0)
    layer = MoELayer(TopKRouter(DIM, 4, 2), FusedExpertMLP(4 // ctx.world, DIM, HIDDEN), ep_mesh=mesh)
    x = torch.randn(5, DIM, generator=torch.Generator().manual_seed(ctx.rank))
    want, _ = layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        narrow, _ = layer(x)
    assert narrow.dtype == torch.bfloat16
    torch.testing.assert_close(narrow.float(), want, rtol=0.05, atol=0.02)
    narrow.float().sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in layer.parameters())
    layer.zero_grad()
    average = torch.optim.swa_utils.AveragedModel(layer)
    average.update_parameters(layer)
    assert torch.equal(average(x)[0], want) and average.module.exchange is layer.exchange
    try:
        pickle.dumps(layer)
    except ConfigError as e:
        assert "state_dict()" in str(e)
    else:
        raise AssertionError("an exchange was pickled")
    compiled, _ = torch.compile(layer, backend="aot_eager")(x)
    torch.testing.assert_close(compiled, want)
    compiled.sum().backward()
    assert all(p.grad is not None for p in layer.parameters())
    with torch.device("meta"):  # as torch.set_default_device("cuda") does: what is on the host must say so
        elsewhere = MoELayer(TopKRouter(DIM, 4, 2), FusedExpertMLP(4 // ctx.world, DIM, HIDDEN), ep_mesh=mesh)
        elsewhere.to_empty(device="cpu").load_state_dict(layer.state_dict())
        y, _ = elsewhere(x)
        y.sum().backward()
    assert torch.equal(y, want)


def sharded_over_replicas(ctx: RankContext) -> tuple[Tensor, dict[str, Tensor], tuple[int, ...]]:
    """2 replicas x 2 expert-parallel ranks: FSDP2 over the replicas for the experts, over all ranks for the router."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    experts = build_experts(SAMPLE | {"experts": 4}, owned := (0, 1) if mesh["ep"].get_local_rank() == 0 else (2, 3))
    layer = MoELayer(TopKRouter(DIM, 4, 2, dtype=torch.float64), experts, ep_mesh=mesh["ep"])
    layer.router.weight_ED.data.copy_(torch.randn(4, DIM, generator=torch.Generator().manual_seed(1), dtype=torch.float64))
    fully_shard(layer.experts, mesh=mesh["dp"])
    fully_shard(layer, mesh=init_device_mesh("cpu", (4,)))
    x = torch.randn(4, 7, DIM, generator=torch.Generator().manual_seed(2), dtype=torch.float64)[ctx.rank]
    y, _ = layer(x)
    y.square().sum().backward()
    # FSDP2 takes the mean over its mesh
    ranks = {n: 2 if n.startswith("experts") else 4 for n, _ in layer.named_parameters()}
    grads = {n: p.grad.full_tensor() * ranks[n] for n, p in layer.named_parameters()}  # type: ignore[union-attr]
    return y.detach(), grads, owned


def saved_and_loaded(ctx: RankContext, folder: str) -> None:
    """7 experts on 3 ranks go into one DCP checkpoint; 2 ranks load it again."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh

    from torchmoe.titan.checkpoint import ExpertShards

    exchange = AllToAllExchange.from_mesh(init_device_mesh("cpu", (ctx.world,)), num_experts=7)
    mine = exchange.local_experts
    layer = MoELayer(TopKRouter(DIM, 7, 2), FusedExpertMLP(len(mine), DIM, HIDDEN), exchange=exchange)
    for i, p in enumerate(layer.parameters()):
        own = torch.tensor([100.0 * e for e in mine]).view(-1, 1, 1) if p.ndim == 3 else 0.0
        p.data = torch.zeros_like(p) + i + own if ctx.world == 3 else torch.zeros_like(p)
    state = {n: ExpertShards(t, mine, 7) if n.startswith("experts.") else t for n, t in layer.state_dict().items()}
    if ctx.world == 3:
        dcp.save(state, checkpoint_id=folder)
        return
    dcp.load(state, checkpoint_id=folder)
    for i, p in enumerate(layer.parameters()):
        assert p.flatten(1)[:, 0].tolist() == [i + 100.0 * e if p.ndim == 3 else i for e in (mine if p.ndim == 3 else range(7))]
