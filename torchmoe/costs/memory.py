"""Memory of one rank, exact mode: what is counted, in bytes, and why. Pure.

State: parameters times their bytes (weight, gradient, master copy, moments). Activations: saved bytes of a unit times the
units in flight. Exchange: rows that are received and held until the weight gradient, and rows on the wire. The experts' own
saved set is in costs.experts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Literal

from torchmoe.costs.experts import SAVE_MODES, ExpertCosts
from torchmoe.costs.model import ModelShape
from torchmoe.errors import ConfigError

__all__ = [
    "FP32",
    "MIXED",
    "MemoryParts",
    "Precision",
    "attention_rank_memory",
    "attention_saved_bytes",
    "dense_saved_bytes",
    "expert_rank_memory",
    "expert_rank_peak",
    "expert_saved_bytes",
    "expert_transient_bytes",
    "head_transient_bytes",
    "live_units_1f1b",
    "live_units_af",
]


@dataclass(frozen=True)
class Precision:
    """Bytes per parameter and per activation element.

    Args:
        weight: the weight that the products read.
        grad: its gradient.
        master: a separate full-precision copy, 0 if the weight is it.
        moments: optimizer moments.
        activation: an activation element.
    """

    weight: int = 2
    grad: int = 2
    master: int = 4
    moments: int = 8
    activation: int = 2

    @property
    def state(self) -> int:
        """Bytes per parameter."""
        return self.weight + self.grad + self.master + self.moments


MIXED = Precision()
FP32 = Precision(weight=4, grad=4, master=0, moments=8, activation=4)


@dataclass(frozen=True)
class MemoryParts:
    """Bytes of one rank by part. ``notes`` says what a part holds."""

    weights: float = 0
    gradients: float = 0
    optimizer: float = 0
    activations: float = 0
    routing: float = 0
    exchange: float = 0
    transient: float = 0
    allowance: float = 0
    live_units: int = 0
    notes: dict[str, str] = field(default_factory=dict)

    @property
    def state(self) -> float:
        return self.weights + self.gradients + self.optimizer

    @property
    def total(self) -> float:
        return self.state + self.activations + self.routing + self.exchange + self.transient + self.allowance

    def rows(self) -> list[tuple[str, float]]:
        names = ("weights", "gradients", "optimizer", "activations", "routing", "exchange", "transient", "allowance")
        return [(n, getattr(self, n)) for n in names]


def live_units_1f1b(*, pp: int, stage: int, v: int = 1, micro_batches: int | None = None) -> int:
    """Stage units in flight on ``stage`` of (interleaved) 1F1B: pp - i, or 2(pp-i-1) + (v-1) pp + 1 with v chunks."""
    n = pp - stage if v == 1 else 2 * (pp - stage - 1) + (v - 1) * pp + 1
    return n if micro_batches is None else min(n, micro_batches * v)


@cache
def live_units_af(*, num_layers: int, pa: int, pf: int, role: str, cycle: int | None = None, micro_batches: int) -> int:
    """Most units (one layer or the head, one micro-batch) in flight on a group of AF-Pipe: the bound its order keeps.

    pA = pF = p: 2(2p - r - 1) + (v-1) G + 1 on group r of the chain, v = ceil((2L+1) / 2p), G the longest of the floor(n/cycle)
    nearly equal cycles. Otherwise the least that the group's first backward needs, (u-1) G + 1 for u units, or u G where a
    group has two units behind the last one, and 2 (2L - last unit) for the round trip. Never more than all units of a step.
    """
    p = max(pa, pf)
    g = 4 * p if cycle is None else cycle
    if g < 2 * p:
        raise ConfigError(f"cycle={g} is below 2p={2 * p}: a backward waits for a forward behind it; use at least {2 * p}")
    longest = -(-micro_batches // max(1, micro_batches // g))
    head = 2 * num_layers
    groups = {("attention", j): list(range(2 * j, head + 1, 2 * pa)) for j in range(pa)}
    groups |= {("ffn", j): list(range(2 * j + 1, head, 2 * pf)) for j in range(pf)}
    most = 0
    for (kind, j), units in groups.items():
        if kind != role or not units:
            continue
        waits = any(sum(s > units[-1] for s in others) > 1 for others in groups.values())
        least = len(units) * longest if waits else (len(units) - 1) * longest + 1
        if pa == pf:
            r = 2 * j + (kind == "ffn")
            enough = 2 * (2 * p - r - 1) + (-(-(head + 1) // (2 * p)) - 1) * longest + 1
        else:
            enough = least + 2 * (head - units[-1])
        has_head = units[-1] == head  # its forward and backward are one action: one at a time
        most = max(most, min(max(enough, least), micro_batches * (len(units) - has_head) + has_head))
    return most


def attention_saved_bytes(
    shape: ModelShape,
    *,
    itemsize: int = 2,
    moe: bool = True,
    fused_norm: bool = True,
    index_itemsize: int = 8,
    shared: bool = True,
) -> float:
    """Bytes per token that the attention half of a block keeps for backward, with a fused attention kernel.

    Elements: block input, residual sum and both norm outputs (4 D); q and k before their norm where there is one, and rotated;
    v, the attention output, the cosines and sines of the token's position. fp32: log-sum-exp per head, one root mean square per
    norm; a MoE's router keeps its scores (E), their sum, the K gates and ids. Shared experts as a dense FFN of their width.
    MLA: expanded q, k, v, and the latents before and after their norm.

    Args:
        fused_norm: a norm keeps its input and the root mean square; composed from plain operations (CPU) also the quotient.
        shared: whether the shared experts run here.
    """
    d, h, kv = shape.dim, shape.num_heads, shape.num_kv_heads
    twice = 1 if fused_norm else 2
    norms = 2
    elements = 2 * d + 2 * d * twice
    if shape.mla:
        elements += h * (2 * shape.qk_dim + 2 * shape.v_dim) + 2 * shape.qk_rope_head_dim
        elements += (shape.kv_lora_rank + shape.q_lora_rank) * (1 + twice) + shape.qk_rope_head_dim
        norms += 1 + bool(shape.q_lora_rank)
    else:
        elements += (h + kv) * (shape.qk_dim + shape.v_dim) + 2 * shape.qk_dim
        if shape.qk_norm:
            elements += (h + kv) * shape.qk_dim * twice
            norms += h + kv
    router = 4 * (shape.num_experts + 1) + shape.top_k * (4 + index_itemsize) if moe else 0
    kept = dense_saved_bytes(shape, width=shape.shared_dim, itemsize=itemsize) if shared and moe and shape.shared_dim else 0
    return elements * itemsize + 4 * (h + norms) + router + kept


def dense_saved_bytes(shape: ModelShape, *, width: int, itemsize: int = 2) -> float:
    """Bytes per token of a plain FFN: gate, its activation, up and their product (GLU: 4 F), or up and its activation (2 F)."""
    return (4 if shape.glu else 2) * width * itemsize


def _experts(shape: ModelShape, itemsize: int, experts: int = 1) -> ExpertCosts:
    return ExpertCosts(
        experts, shape.dim, shape.expert_dim, shape.top_k, gated=shape.glu, bias=shape.expert_bias, element_size=itemsize
    )


def expert_saved_bytes(
    shape: ModelShape, *, save: str, itemsize: int = 2, rows: float = 1.0, pairs: float | None = None, experts: int = 0
) -> float:
    """Bytes kept by the routed experts for ``rows`` received rows and ``pairs`` (row, expert) pairs (default K per row).

    x once per row, the hidden columns of ``save`` per pair, K fp32 gates per row (an expert rank gets all K), and int32 lists:
    the row of each pair, K slots per row, and ``experts`` + 1 offsets. With pairs = K rows this is ``ExpertCosts.saved_bytes``.
    """
    pairs = shape.top_k * rows if pairs is None else pairs
    if save not in SAVE_MODES:
        raise ConfigError(f"save={save!r} is unknown; use one of {', '.join(SAVE_MODES)}")
    if save == "half" and not shape.glu:
        raise ConfigError("save='half' keeps one of the two halves of a GLU, and this model has none; use 'preact' or 'input'")
    columns = _experts(shape, itemsize).saved_hidden_columns(save)
    slots = rows * shape.top_k
    index = pairs + slots + (experts + 1 if experts else 0)
    return (rows * shape.dim + pairs * columns) * itemsize + 4 * slots + 4 * index


def head_transient_bytes(shape: ModelShape, *, tokens: float, itemsize: int = 2) -> float:
    """Logits and their gradient of one micro-batch on one rank: V x (itemsize + fp32) and once more for the gradient."""
    return tokens * shape.vocab_size * (itemsize + 4) * 2


def expert_transient_bytes(shape: ModelShape, *, pairs: float, save: str = "preact", itemsize: int = 2) -> float:
    """Largest working set of the expert MLP besides what it keeps; fewer with ``chunk_tokens``. See ``ExpertCosts``."""
    costs = _experts(shape, itemsize)
    tokens = round(pairs / shape.top_k)
    return max(costs.forward_transient_bytes(tokens, save), costs.backward_transient_bytes(tokens, save))


def _state(params: float, precision: Precision, copies: int) -> dict[str, float]:
    return {
        "weights": params * precision.weight,
        "gradients": params * precision.grad,
        "optimizer": params * (precision.master + precision.moments) / copies,
    }


def attention_rank_memory(
    shape: ModelShape,
    *,
    layers: int,
    dense_layers: int = 0,
    embedding: bool = False,
    head: bool = False,
    tokens: float,
    live_units: int,
    rows_per_token: float,
    precision: Precision = MIXED,
    recompute: str = "none",
    optimizer_copies: int = 1,
    allowance: float = 0.0,
    fused_norm: bool = True,
    shared: bool = True,
) -> MemoryParts:
    """Bytes of one rank of an attention group.

    Args:
        layers: MoE layers of the group; ``dense_layers`` run before the first of them.
        embedding, head: whether the group holds them.
        tokens: of one micro-batch on this rank.
        live_units: units whose activations are held at the peak, the head's (which is the transient) among them.
        rows_per_token: rows that a token is dispatched as.
        recompute: "full" keeps only a unit's input and what was dispatched.
        optimizer_copies: ranks over which master copy and moments are sharded.
        fused_norm: see :func:`attention_saved_bytes`.
        shared: whether the shared experts live here; where the residual rides they are on the expert ranks.
    """
    params = layers * (shape.attention_side_params - (0 if shared else shape.shared_params))
    params += dense_layers * (shape.attention_params + shape.dim + shape.dense_params)
    params += shape.embedding_params * embedding + shape.head_params * head
    item = precision.activation
    row = shape.dim * item
    if recompute == "full":
        unit = 2.0 * row
    else:
        unit = attention_saved_bytes(shape, itemsize=item, fused_norm=fused_norm, shared=shared)
        if dense_layers:  # they run inside the units of one of the group's layers
            dense = attention_saved_bytes(shape, itemsize=item, moe=False, fused_norm=fused_norm) + dense_saved_bytes(
                shape, width=shape.dense_dim, itemsize=item
            )
            unit += dense * dense_layers / layers
    live_units = max(1, live_units - head)
    routing = shape.top_k * (4 + 4)
    wire = rows_per_token * (2 * row + shape.top_k * 12)
    return MemoryParts(
        **_state(params, precision, optimizer_copies),
        activations=live_units * tokens * unit,
        routing=live_units * tokens * routing,
        exchange=2 * tokens * wire,
        transient=head_transient_bytes(shape, tokens=tokens, itemsize=item) if head else 0.0,
        allowance=allowance,
        live_units=live_units,
        notes={
            "activations": f"{live_units} units of {tokens:g} tokens, {unit:.0f} B per token",
            "routing": "expert ids and gates of the units in flight, for the return route",
            "exchange": f"{rows_per_token:.2f} rows per token: one dispatch sent while one is packed, and their returns",
            "transient": "logits and their gradient of one micro-batch" if head else "",
            "allowance": "device context, communicators, fragmentation",
        },
    )


def expert_rank_memory(
    shape: ModelShape,
    *,
    layers: int,
    experts: int,
    rows: float,
    pairs: float,
    live_units: int,
    precision: Precision = MIXED,
    save: str = "preact",
    optimizer_copies: int = 1,
    allowance: float = 0.0,
    ride_tokens: float = 0.0,
) -> MemoryParts:
    """Bytes of one rank of an FFN group: ``experts`` experts of each of ``layers`` layers.

    Args:
        rows, pairs: received rows and (row, expert) pairs of one micro-batch and layer on this rank.
        live_units: (layer, micro-batch) pairs held at the peak.
        ride_tokens: where the residual rides, tokens whose residual and shared experts this rank adds: it then also holds the
            un-normalised rows, ffn_norm, the shared experts, and what they keep (their input, their set, their output).
    """
    item = precision.activation
    row = shape.dim * item
    kept = expert_saved_bytes(shape, save=save, itemsize=item, rows=rows, pairs=pairs, experts=experts)
    params = experts * shape.expert_params
    if ride_tokens:
        params += shape.dim + shape.shared_params
        kept += rows * (row + 4)
        if shape.shared_dim:
            kept += ride_tokens * (2 * row + dense_saved_bytes(shape, width=shape.shared_dim, itemsize=item))
    return MemoryParts(
        **_state(layers * params, precision, optimizer_copies),
        activations=live_units * kept,
        routing=live_units * rows * shape.top_k * 8,
        exchange=rows * 4 * row,
        transient=expert_transient_bytes(shape, pairs=pairs, save=save, itemsize=item),
        allowance=allowance,
        live_units=live_units,
        notes={
            "activations": f"{live_units} units of {rows:.0f} rows and {pairs:.0f} pairs, save={save!r}",
            "routing": "ids and gates of the received rows",
            "exchange": "results being sent, gradients being received and sent, one look-ahead receive",
            "transient": "backward of one unit: dH, A' and the rows of dX",
            "allowance": "device context, communicators, fragmentation",
        },
    )


def expert_rank_peak(
    shape: ModelShape,
    *,
    layers: int,
    experts: int,
    order: Iterable[tuple[Literal["F", "B"], int, int]],
    loads: Mapping[tuple[int, int], tuple[float, float]],
    precision: Precision = FP32,
    save: str = "preact",
    scratch_rows: int = 0,
) -> float:
    """Peak bytes of an expert rank whose loads are known, by walking its schedule: :func:`expert_rank_memory` is for mean loads.

    At every action live: what the units that were forwarded and not yet backwarded keep, the gradients of the layers that had a
    backward (their buffers are made then), the working set, and rows on the wire: the last combine and the last d_dispatch while
    they are sent, dy as received and as assembled.

    Args:
        order: forwards and backwards of (layer, micro-batch), as the rank runs them.
        loads: (received rows, (row, expert) pairs) of each.
        scratch_rows: rows of a block of the plain PyTorch kernels (``experts.BLOCK_ROWS``); 0 for fused ones.
    """
    item, mlp = precision.activation, _experts(shape, precision.activation)
    row, halves = shape.dim * item, mlp.halves
    state = layers * experts * shape.expert_params * (precision.state - precision.grad)
    gradient = experts * shape.expert_params * precision.grad
    kept: dict[tuple[int, int], float] = {}
    seen: set[int] = set()
    held = most = combine = d_dispatch = 0.0
    for op, layer, batch in order:
        rows, pairs = loads[layer, batch]
        wire, grads = combine + d_dispatch, len(seen) * gradient
        block = min(scratch_rows, pairs) * (shape.dim + (halves + 2) * shape.expert_dim) * max(4, item)
        if op == "F":
            kept[layer, batch] = expert_saved_bytes(shape, save=save, itemsize=item, rows=rows, pairs=pairs, experts=experts)
            held += kept[layer, batch]
            combine = rows * row
            working = pairs * (shape.expert_dim + shape.dim) * item + combine
            most = max(most, held + grads + wire + working + block)
            continue
        hidden = pairs * (halves + 1) * shape.expert_dim * item  # dH and A'
        repeated = pairs * {"input": halves, "half": 1}.get(save, 0) * shape.expert_dim * item
        d_dispatch = rows * row
        most = max(most, held + grads + wire + 2 * d_dispatch + hidden + repeated + block)
        # the weight gradient: the pre-activations are gone, dX~ and the layer's gradient are there
        held -= kept.pop((layer, batch))
        seen.add(layer)
        most = max(most, held + len(seen) * gradient + wire + 3 * d_dispatch + hidden + pairs * row)
    return state + most
