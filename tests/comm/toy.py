"""A small MoE chain on the bare exchange, and the same in one process: what every parity test here compares.

Layer l: r = h + tanh(h A); x = rms(r) g; gates = softmax(x R) at the given ids; h' = r + shared(x) + sum_k gate_k expert(x).
With residual='ride' the rows carry r, and h' is what comes back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from torchmoe.comm.calls import M2NCalls, Rows
from torchmoe.comm.m2n import Key, M2NExchange
from torchmoe.comm.route import SequenceMap
from torchmoe.placement import Placement
from torchmoe.router import Routing

Params = dict[str, Tensor]


@dataclass(frozen=True)
class Toy:
    """One case: the layout, the ids of every sequence, and the exchange's settings."""

    attention: tuple[int, ...]
    ffn: tuple[int, ...]
    ids: tuple[tuple[tuple[tuple[int, ...], ...], ...], ...]  # [layer][sequence][token][k]
    num_experts: int
    dim: int = 6
    replicas: int = 1
    dtype: torch.dtype = torch.float64
    owners: tuple[tuple[int, ...], ...] | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    head: Literal["attention", "ffn"] = "attention"

    @property
    def placement(self) -> Placement:
        return Placement(
            attention=self.attention,
            ffn=self.ffn,
            num_layers=len(self.ids),
            num_experts=self.num_experts,
            replicas=self.replicas,
            owners=self.owners,
            head=self.head,
        )

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(len(s) for s in self.ids[0])

    @property
    def top_k(self) -> int:
        return max((len(t) for layer in self.ids for s in layer for t in s), default=1)

    @property
    def residual(self) -> str:
        return str(self.settings.get("residual") or self.placement.default_residual)

    def ids_of(self, layer: int, sequences: Sequence[int]) -> Tensor:
        rows = [t for q in sequences for t in self.ids[layer][q]]
        return torch.tensor(rows, dtype=torch.long).view(-1, self.top_k)


def random_toy(
    attention: Sequence[int], ffn: Sequence[int], *, seed: int = 0, top_k: int = 2, layers: int = 1, **more: Any
) -> Toy:
    """Random ids: drops, an idle expert, a token without slots, ragged lengths, an empty sequence, an idle first source."""
    g = torch.Generator().manual_seed(seed)
    num_experts = more.pop("num_experts", 7)
    lengths = more.pop("lengths", (3, 0, 5, 1, 4, 2))
    out = []
    for layer in range(layers):
        per_layer = []
        for q, n in enumerate(lengths):
            ids = (
                torch.stack([torch.randperm(num_experts - 1, generator=g)[:top_k] for _ in range(n)])
                if n
                else torch.empty(0, top_k)
            )
            ids = ids.long().masked_fill(torch.rand(n, top_k, generator=g) < 0.15, -1)
            if n > 3:
                ids[1] = -1
            if q == 0 and layer % 2 == 0:
                ids[:] = -1
            per_layer.append(tuple(map(tuple, ids.tolist())))
        out.append(tuple(per_layer))
    return Toy(tuple(attention), tuple(ffn), tuple(out), num_experts, **more)


def parameters(toy: Toy) -> Params:
    g = torch.Generator().manual_seed(7)
    d = toy.dim
    out: Params = {}
    for layer in range(len(toy.ids)):
        out[f"{layer}.a"] = torch.randn(d, d, generator=g, dtype=toy.dtype) / d**0.5
        out[f"{layer}.g"] = 1 + 0.2 * torch.randn(d, generator=g, dtype=toy.dtype)
        out[f"{layer}.r"] = torch.randn(d, toy.num_experts, generator=g, dtype=toy.dtype)
        out[f"{layer}.s"] = torch.randn(d, d, generator=g, dtype=toy.dtype) / d**0.5
        for e in range(toy.num_experts):
            out[f"{layer}.e{e}"] = torch.randn(d, d, generator=g, dtype=toy.dtype) / d**0.5
    return out


def tokens(toy: Toy) -> list[Tensor]:
    g = torch.Generator().manual_seed(3)
    return [torch.randn(n, toy.dim, generator=g, dtype=toy.dtype) for n in toy.lengths]


def attend(h: Tensor, p: Params, layer: int) -> Tensor:
    return h + torch.tanh(h @ p[f"{layer}.a"])


def norm(r: Tensor, p: Params, layer: int) -> Tensor:
    return r * torch.rsqrt(r.pow(2).mean(-1, keepdim=True) + 1e-6) * p[f"{layer}.g"]


def gates_of(x: Tensor, ids: Tensor, p: Params, layer: int) -> Tensor:
    return (x @ p[f"{layer}.r"]).softmax(-1).gather(1, ids.clamp(min=0))


def experts(x: Tensor, ids: Tensor, gates: Tensor, p: Params, layer: int, local: Sequence[int]) -> Tensor:
    y = torch.zeros_like(x)
    for e in local:
        # one matrix product per expert over exactly its rows, so that its bits do not depend on who else is here
        row, slot = (ids == e).nonzero(as_tuple=True)
        out = torch.tanh(x[row] @ p[f"{layer}.e{e}"]) * gates[row, slot][:, None].to(x.dtype)
        y = y.index_add(0, row, out)
    return y


def shared(x: Tensor, p: Params, layer: int) -> Tensor:
    return torch.sin(x @ p[f"{layer}.s"])


def reference(toy: Toy) -> tuple[Tensor, Params]:
    """Final h of all sequences and every gradient, in one process."""
    p = {k: v.clone().requires_grad_() for k, v in parameters(toy).items()}
    inputs = [t.requires_grad_() for t in tokens(toy)]
    h = torch.cat(inputs)
    for layer in range(len(toy.ids)):
        ids = toy.ids_of(layer, range(len(toy.lengths)))
        r = attend(h, p, layer)
        x = norm(r, p, layer)
        y = experts(x, ids, gates_of(x, ids, p, layer), p, layer, range(toy.num_experts))
        h = r + shared(x, p, layer) + y
    loss_of(h).backward()
    grads = {k: v.grad if v.grad is not None else torch.zeros_like(v) for k, v in p.items()}
    grads["inputs"] = torch.cat([t.grad if t.grad is not None else torch.zeros_like(t) for t in inputs])
    return h.detach(), grads


def loss_of(h: Tensor) -> Tensor:
    return (h * torch.cos(h)).sum()


def run_rank(ctx: Any, toy: Toy, debug: bool = False) -> dict[str, Any]:
    """The program of one rank."""
    pl = toy.placement
    transport = ctx.transport(pl.communicators(toy.residual), record=True)
    ex = M2NExchange(pl, transport, dim=toy.dim, top_k=toy.top_k, dtype=toy.dtype, debug=debug, **toy.settings)
    return run_on(ex, toy)


def run_on(ex: M2NExchange, toy: Toy) -> dict[str, Any]:
    p = {k: v.clone().requires_grad_() for k, v in parameters(toy).items()}
    calls = M2NCalls(ex)
    out = (_attention if ex.where.role == "attention" else _ffn)(ex, calls, toy, p)
    out["grads"] = {k: v.grad for k, v in p.items() if v.grad is not None}
    out["log"] = ex.transport.log()
    out["dropped"] = ex.dropped_rows()
    return out


def _attention(ex: M2NExchange, calls: M2NCalls, toy: Toy, p: Params) -> dict[str, Any]:
    pl, num_layers = ex.placement, len(toy.ids)
    seqs = SequenceMap(pl, toy.lengths)
    mine = pl.sequences(ex.where.group, ex.where.index, len(toy.lengths), ex.where.replica)
    data, inputs, h, loss = tokens(toy), None, None, None
    if ex.where.group == pl.embedding_group:
        inputs = torch.cat([data[q] for q in mine] or [torch.zeros(0, toy.dim, dtype=toy.dtype)]).requires_grad_()
        h = inputs
    ride = ex.residual == "ride"
    for layer in range(num_layers):
        key = Key(layer, 0)
        if ex.where.group == pl.attention_group(layer):
            assert h is not None
            ids = toy.ids_of(layer, mine)
            r = attend(h, p, layer)
            x = norm(r, p, layer)
            routing = Routing(ids, gates_of(x, ids, p, layer))
            res = r if ride else r + shared(x, p, layer)
            if pl.hands_over(layer):
                calls.dispatch(key, seqs, r if ride else x, routing)
                if not ride:
                    calls.send_residual(key, seqs, res)
            else:
                y = calls(key, seqs=seqs, x_TD=r if ride else x, routing=routing)
                assert y is not None
                h = y if ride else res + y
        if pl.hands_over(layer) and ex.where.group == pl.attention_group(layer + 1):
            h = collected(ex, calls, key, seqs)
    last = ex.where.group == pl.head_group
    if last:
        assert h is not None
        loss = loss_of(h)
    calls.backward(loss)
    return {
        "h": h.detach() if last and h is not None else None,
        "inputs": None if inputs is None else inputs.grad if inputs.grad is not None else torch.zeros_like(inputs),
    }


def _ffn(ex: M2NExchange, calls: M2NCalls, toy: Toy, p: Params) -> dict[str, Any]:
    pl, h, loss = ex.placement, None, None
    for layer in range(len(toy.ids)):
        if ex.where.group == pl.ffn_group(layer):
            key = Key(layer, 0)
            rows = calls.receive(key)
            calls.combine(key, expert_rank(ex, calls, key, rows, p))
    if ex.where.group == pl.head_group:
        h = collected(ex, calls, key, SequenceMap(pl, toy.lengths))
        loss = loss_of(h)
    calls.backward(loss)
    return {"h": None if h is None else h.detach()}


def collected(ex: M2NExchange, calls: M2NCalls, key: Key, seqs: SequenceMap) -> Tensor:
    """The next layer's input, on the ranks it was handed over to."""
    y = calls.collect(key, seqs)
    return y if ex.residual == "ride" else y + calls.receive_residual(key, seqs)


def expert_rank(ex: M2NExchange, calls: M2NCalls, key: Key, rows: Rows, p: Params) -> Tensor:
    local = ex.placement.local_experts(key.layer, ex.where.index)
    if ex.residual != "ride":
        return experts(rows.rows_RD, rows.ids_RK, rows.gates_RK, p, key.layer, local)
    h = rows.rows_RD
    x = norm(h, p, key.layer)
    y = experts(x, rows.ids_RK, rows.gates_RK, p, key.layer, local)
    primary = ex.primary(key, calls.received(key), rows.ids_RK)[:, None]
    return y + torch.where(primary, h + shared(x, p, key.layer), 0)


def gathered(toy: Toy, ranks: Sequence[dict[str, Any]]) -> tuple[Tensor, Params]:
    """What :func:`reference` returns, put together from all ranks (sequences are contiguous, replica by replica)."""
    pl = toy.placement
    h: dict[int, Tensor] = {}
    inputs: dict[int, Tensor] = {}
    for out, key, group in ((h, "h", pl.head_group), (inputs, "inputs", pl.embedding_group)):
        for rep in range(pl.replicas):
            for i, rank in enumerate(pl.ranks(group, rep)):
                held = pl.sequences(group, i, len(toy.lengths), rep)
                parts = torch.split(ranks[rank][key], [toy.lengths[q] for q in held]) if len(held) else ()
                out |= dict(zip(held, parts, strict=True))
    grads: Params = {}
    for k, v in parameters(toy).items():
        parts = [r["grads"][k] for r in ranks if k in r["grads"]]
        grads[k] = torch.stack(parts).sum(0) if parts else torch.zeros_like(v)
    n = range(len(toy.lengths))
    grads["inputs"] = torch.cat([inputs[q] for q in n])
    return torch.cat([h[q] for q in n]), grads
