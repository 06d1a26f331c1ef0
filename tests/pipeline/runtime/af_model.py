"""A small MoE transformer written twice: as one fp64 program under autograd, and as stages for the runner.

The two share the dense maths (attention, norms, router) and nothing of the experts, the exchange or the order of work.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from torchmoe.pipeline.runtime.ride import RideExperts
from torchmoe.pipeline.runtime.stage import AttentionOutput, MicroBatch, Stages
from torchmoe.placement import Placement, Where
from torchmoe.router import Routing

VOCAB, ALPHA = 32, 0.01


@dataclass(frozen=True)
class Shape:
    layers: int = 3
    dim: int = 10
    heads: int = 2
    experts: int = 6
    top_k: int = 2
    hidden: int = 7
    shared: int = 5


@dataclass(frozen=True)
class Case:
    """A placement, a global batch and what happens to its slots."""

    attention: tuple[int, ...]
    ffn: tuple[int, ...]
    layers: int = 3
    replicas: int = 1
    sequences: int = 4
    microbatches: int = 8
    lengths: tuple[tuple[int, ...], ...] = ()  # per micro-batch, cycled; default 5 tokens everywhere
    drop: float = 0.1
    idle: tuple[int, ...] = ()  # sequences whose every slot is dropped in even layers
    owners: tuple[tuple[int, ...], ...] | None = None
    cycle: int | None = None
    shape: Shape = field(default_factory=Shape)
    head: Literal["attention", "ffn"] = "attention"
    options: dict[str, Any] = field(default_factory=dict)  # of M2NExchange

    @property
    def ride(self) -> bool:
        return self.options.get("residual") == "ride"

    @property
    def placement(self) -> Placement:
        return Placement(
            attention=self.attention,
            ffn=self.ffn,
            num_layers=self.layers,
            num_experts=self.shape.experts,
            replicas=self.replicas,
            owners=self.owners,
            head=self.head,
        )

    def length(self, mb: int) -> tuple[int, ...]:
        return self.lengths[mb % len(self.lengths)] if self.lengths else (5,) * self.sequences


class Data:
    """Tokens, labels and dropped slots of every sequence of the global batch."""

    def __init__(self, case: Case) -> None:
        g = torch.Generator().manual_seed(1)
        self.case = case
        self.tokens = [[torch.randint(VOCAB, (n + 1,), generator=g) for n in case.length(m)] for m in range(case.microbatches)]
        self.drop = {
            (layer, m, s): torch.rand(n, case.shape.top_k, generator=g) < (2 if s in case.idle and layer % 2 == 0 else case.drop)
            for layer in range(case.layers)
            for m in range(case.microbatches)
            for s, n in enumerate(case.length(m))
        }
        self.num_sequences = case.microbatches * case.sequences
        self.num_tokens = sum(sum(case.length(m)) for m in range(case.microbatches))


def parameters(case: Case) -> dict[str, Tensor]:
    """All parameters of the model by name, fp64."""
    s, g = case.shape, torch.Generator().manual_seed(0)

    def weight(*size: int) -> Tensor:
        return torch.randn(*size, generator=g, dtype=torch.float64) / size[0] ** 0.5

    def scale() -> Tensor:
        return 1 + 0.2 * torch.randn(s.dim, generator=g, dtype=torch.float64)

    out = {"emb": torch.randn(VOCAB, s.dim, generator=g, dtype=torch.float64), "norm": scale(), "head": weight(s.dim, VOCAB)}
    for layer in range(case.layers):
        out |= {
            f"{layer}.attn_norm": scale(),
            f"{layer}.wqkv": weight(s.dim, 3 * s.dim),
            f"{layer}.wo": weight(s.dim, s.dim),
            f"{layer}.ffn_norm": scale(),
            f"{layer}.router": 2 * weight(s.dim, s.experts),
            f"{layer}.shared1": weight(s.dim, s.shared),
            f"{layer}.shared2": weight(s.shared, s.dim),
            f"{layer}.w1_EFD": weight(s.dim, s.experts * s.hidden).view(s.dim, s.experts, s.hidden).permute(1, 2, 0).contiguous(),
            f"{layer}.w3_EFD": weight(s.dim, s.experts * s.hidden).view(s.dim, s.experts, s.hidden).permute(1, 2, 0).contiguous(),
            f"{layer}.w2_EDF": weight(s.hidden, s.experts * s.dim).view(s.hidden, s.experts, s.dim).permute(1, 2, 0).contiguous(),
        }
    return out


def rms(x: Tensor, w: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w


class Dense:
    """Everything but the routed experts, sequence by sequence."""

    def __init__(self, case: Case, data: Data, params: dict[str, Tensor]) -> None:
        self.case, self.data, self.p = case, data, params

    def attend(self, layer: int, h_TD: Tensor, lengths: list[int]) -> Tensor:
        s = self.case.shape
        out = []
        for x in (rms(h_TD, self.p[f"{layer}.attn_norm"]) @ self.p[f"{layer}.wqkv"]).split(lengths):
            q, k, v = x.view(len(x), 3, s.heads, s.dim // s.heads).permute(1, 2, 0, 3)
            o = F.scaled_dot_product_attention(q, k, v, is_causal=True) if len(x) else q
            out.append(o.transpose(0, 1).reshape(len(x), s.dim))
        o_TD = torch.cat(out) if out else h_TD.new_zeros(0, s.dim)
        return h_TD + o_TD @ self.p[f"{layer}.wo"]

    def route(self, layer: int, x_TD: Tensor, mb: int, sequences: range) -> Routing:
        s = self.case.shape
        scores_TE = (x_TD @ self.p[f"{layer}.router"]).softmax(-1)
        gates_TK, ids_TK = scores_TE.topk(s.top_k, -1)
        aux = scores_TE.sum() * 0
        for q, sc, ids in zip(
            sequences, *(t.split([self.case.length(mb)[q] for q in sequences]) for t in (scores_TE, ids_TK)), strict=True
        ):
            if len(sc):  # per-sequence balancing: equal for every split of the batch
                load = F.one_hot(ids, s.experts).sum(1).to(sc).mean(0)
                aux = aux + ALPHA * s.experts * (load * sc.mean(0)).sum() / self.data.num_sequences
            del q
        drop = [self.data.drop[layer, mb, q] for q in sequences]
        drop_TK = torch.cat(drop) if drop else torch.zeros(0, s.top_k, dtype=torch.bool)
        return Routing(ids_TK.masked_fill(drop_TK, -1), gates_TK / gates_TK.sum(-1, keepdim=True), aux)

    def attention(self, layer: int, h_TD: Tensor, mb: int, sequences: range) -> AttentionOutput:
        lengths = [self.case.length(mb)[q] for q in sequences]
        h_TD = self.attend(layer, h_TD, lengths)
        x_TD = rms(h_TD, self.p[f"{layer}.ffn_norm"])
        routing = self.route(layer, x_TD, mb, sequences)
        return AttentionOutput(h_TD, x_TD, routing)

    def norm(self, layer: int, h_TD: Tensor) -> Tensor:
        return rms(h_TD, self.p[f"{layer}.ffn_norm"])

    def shared(self, layer: int, x_TD: Tensor) -> Tensor:
        return F.silu(x_TD @ self.p[f"{layer}.shared1"]) @ self.p[f"{layer}.shared2"]

    def attention_and_shared(self, layer: int, h_TD: Tensor, mb: int, sequences: range) -> AttentionOutput:
        h_TD, x_TD, routing = self.attention(layer, h_TD, mb, sequences)
        return AttentionOutput(h_TD + self.shared(layer, x_TD), x_TD, routing)

    def embed(self, mb: int, sequences: range) -> Tensor:
        return self.p["emb"][torch.cat([self.data.tokens[mb][q][:-1] for q in sequences] or [torch.zeros(0, dtype=torch.long)])]

    def labels(self, mb: int, sequences: range) -> Tensor:
        return torch.cat([self.data.tokens[mb][q][1:] for q in sequences] or [torch.zeros(0, dtype=torch.long)])

    def loss(self, h_TD: Tensor, labels: Tensor) -> Tensor:
        logits = rms(h_TD, self.p["norm"]) @ self.p["head"]
        return F.cross_entropy(logits, labels, reduction="sum") / self.data.num_tokens


def reference(case: Case, data: Data) -> tuple[float, dict[str, Tensor], dict[tuple[int, int], Tensor]]:
    """(loss, gradients, routing by (layer, micro-batch)) of one process under autograd."""
    params = {k: v.clone().requires_grad_() for k, v in parameters(case).items()}
    dense = Dense(case, data, params)
    total = torch.zeros((), dtype=torch.float64)
    ids = {}
    for m in range(case.microbatches):
        everything = range(case.sequences)
        h_TD = dense.embed(m, everything)
        for layer in range(case.layers):
            res_TD, x_TD, r = dense.attention_and_shared(layer, h_TD, m, everything)
            y_TD = torch.zeros_like(x_TD)
            for e in range(case.shape.experts):
                gate_T = ((r.expert_ids_TK == e) * r.gates_TK).sum(-1, keepdim=True)
                w1, w3, w2 = (params[f"{layer}.{n}"][e] for n in ("w1_EFD", "w3_EFD", "w2_EDF"))
                y_TD = y_TD + gate_T * ((F.silu(x_TD @ w1.T) * (x_TD @ w3.T)) @ w2.T)
            assert r.aux is not None
            h_TD, total, ids[layer, m] = res_TD + y_TD, total + r.aux, r.expert_ids_TK
        total = total + dense.loss(h_TD, dense.labels(m, everything))
    total.backward()
    return total.item(), {k: v.grad if v.grad is not None else torch.zeros_like(v) for k, v in params.items()}, ids


class LoopExperts:
    """ExpertStage in its plainest form: one autograd graph per unit, a loop over local experts."""

    def __init__(self, params: dict[str, Tensor], layer: int, local: tuple[int, ...], top_k: int) -> None:
        self.params, self.layer, self.local, self.top_k = params, layer, local, top_k

    def forward_saved(self, rows_RD: Tensor, ids_RK: Tensor, gates_RK: Tensor) -> tuple[Tensor, object]:
        with torch.enable_grad():
            x, g = rows_RD.detach().clone().requires_grad_(), gates_RK.detach().clone().requires_grad_()
            w = [self.params[f"{self.layer}.{n}"].detach().requires_grad_() for n in ("w1_EFD", "w3_EFD", "w2_EDF")]
            y = torch.zeros_like(x)
            for e in self.local:
                gate = torch.where(ids_RK == e, g, 0.0).sum(-1, keepdim=True).to(x.dtype)
                y = y + gate * ((F.silu(x @ w[0][e].T) * (x @ w[1][e].T)) @ w[2][e].T)
        return y.detach(), (x, g, w, y)

    def backward_input(self, saved: object, dy_RD: Tensor) -> tuple[Tensor, Tensor, object]:
        x, g, w, y = saved  # type: ignore[misc]
        if not y.requires_grad:
            return torch.zeros_like(x), torch.zeros_like(g), _Accumulate([], [])
        dx, dg, *dw = torch.autograd.grad(y, [x, g, *w], dy_RD, allow_unused=True)
        names = [f"{self.layer}.{n}" for n in ("w1_EFD", "w3_EFD", "w2_EDF")]
        return dx, dg, _Accumulate([self.params[n] for n in names], dw)


class _Accumulate:
    def __init__(self, params: list[Tensor], grads: list[Tensor]) -> None:
        self.params, self.grads = params, grads

    def run(self) -> None:
        for p, g in zip(self.params, self.grads, strict=True):
            p.grad = g.clone() if p.grad is None else p.grad + g


def build_stages(case: Case, data: Data, where: Where, params: dict[str, Tensor]) -> Stages:
    """The stages of one rank over its parameters."""
    pl = case.placement
    dense = Dense(case, data, params)
    mine = pl.stages(where.group)

    def sequences(mb: MicroBatch) -> range:
        return pl.sequences(where.group, where.index, len(mb.lengths), where.replica)

    half = dense.attention if case.ride else dense.attention_and_shared
    attention = {
        u // 2: (lambda h_TD, mb, layer=u // 2: half(layer, h_TD, mb.index, sequences(mb)))
        for u in mine
        if u % 2 == 0 and u < 2 * case.layers
    }
    experts = {
        u // 2: LoopExperts(params, u // 2, pl.local_experts(u // 2, where.index), case.shape.top_k) for u in mine if u % 2
    }
    if case.ride:
        experts = {
            layer: RideExperts(e, lambda h, layer=layer: dense.norm(layer, h), lambda x, layer=layer: dense.shared(layer, x))
            for layer, e in experts.items()
        }
    return Stages(
        attention=attention,
        experts=experts,
        embedding=(lambda mb: dense.embed(mb.index, sequences(mb))) if where.group == pl.embedding_group else None,
        head=(lambda h_TD, mb: dense.loss(h_TD, mb.target)) if where.group == pl.head_group else None,
    )
