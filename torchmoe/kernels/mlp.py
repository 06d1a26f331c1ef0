"""The forward and the backward of the expert MLP, composed of the kernels of one backend; what is saved between them.

The minimal scheme: with x, H, the indices and the gates every gradient follows without repeating a GEMM. A is always computed
from H rounded to its storage dtype, so every save mode gives the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from torchmoe.kernels.reference import Hidden, accumulation_dtype

__all__ = [
    "SAVE_MODES",
    "Hiddens",
    "Index",
    "Upstream",
    "Weights",
    "backward_rows",
    "forward",
    "input_gradient",
    "weight_gradient",
]

SAVE_MODES = ("input", "half", "preact", "all")


class Weights(NamedTuple):
    """Weights in the split layout (views are fine): w1_EFD, w3_EFD (gated units), w2_EDF, b1_EF, b3_EF, b2_ED."""

    w1: Tensor
    w3: Tensor | None
    w2: Tensor
    b1: Tensor | None = None
    b3: Tensor | None = None
    b2: Tensor | None = None


class Index(NamedTuple):
    """The queue's tensors that the kernels read: token of each row [P], offsets [E+1], row of each slot, CSR offsets or None."""

    tokens: Tensor
    offsets: Tensor
    map: Tensor
    token_offsets: Tensor | None = None


class Hiddens(NamedTuple):
    """What a save mode keeps besides x: h is the gate half ("half"), or all pre-activations; a only in "all"."""

    h: Tensor | None = None
    a: Tensor | None = None


@dataclass
class Upstream:
    """Row-wise products of the backward that the input and the weight gradients share."""

    dh: Tensor
    ag: Tensor
    gates_P: Tensor


def forward(
    kernels: ModuleType, x_TD: Tensor, gates: Tensor, index: Index, weights: Weights, activation: str, save: str
) -> tuple[Tensor, Hiddens]:
    """y [T, D] and what ``save`` keeps. ``save="none"`` keeps nothing and writes no pre-activations (inference)."""
    a_PF, h = kernels.up_projection(
        x_TD,
        index.tokens,
        index.offsets,
        weights.w1,
        weights.w3,
        weights.b1,
        weights.b3,
        activation,
        save in ("half", "preact", "all"),
        save == "half",
    )
    y_PD = kernels.down_projection(a_PF, index.offsets, weights.w2, weights.b2)
    kept = Hiddens(h, a_PF if save == "all" else None)
    del a_PF
    return kernels.combine(y_PD, index.map, gates, index.token_offsets), kept


def rows_of_slots(values: Tensor, index: Index) -> Tensor:
    """[P] values in row order from values in slot order; rows that do not exist hold 0."""
    P = index.tokens.numel()
    flat = index.map.reshape(-1)
    out = torch.zeros(P + 1, dtype=accumulation_dtype(values.dtype), device=values.device)
    out.scatter_(0, torch.where(flat >= 0, flat, P).long(), values.reshape(-1).to(out.dtype))
    return out[:P]


def slots_of_rows(values_P: Tensor, index: Index, dtype: torch.dtype) -> Tensor:
    """Values in slot order from values in row order; dropped slots hold 0."""
    if values_P.numel() == 0:
        return torch.zeros(index.map.shape, dtype=dtype, device=values_P.device)
    picked = values_P.index_select(0, index.map.reshape(-1).clamp(min=0)).reshape(index.map.shape)
    return torch.where(index.map >= 0, picked, torch.zeros((), dtype=values_P.dtype, device=values_P.device)).to(dtype)


def backward_rows(
    kernels: ModuleType,
    dy_TD: Tensor,
    x_TD: Tensor | None,
    gates: Tensor,
    index: Index,
    weights: Weights,
    hiddens: Hiddens,
    activation: str,
    save: str,
) -> tuple[Upstream, Tensor]:
    """dH, A' and the gate gradient (in slot order). Repeats what ``save`` did not keep: nothing, one half, or H."""
    h: Hidden
    if save == "input":
        _, whole = kernels.up_projection(
            x_TD, index.tokens, index.offsets, weights.w1, weights.w3, weights.b1, weights.b3, activation, True, False
        )
        assert whole is not None
        h = whole
    elif save == "half":
        up_PF, _ = kernels.up_projection(
            x_TD, index.tokens, index.offsets, weights.w3, None, weights.b3, None, "identity", False, False
        )
        assert hiddens.h is not None
        h = (hiddens.h, up_PF)
    else:
        assert hiddens.h is not None
        h = hiddens.h
    gates_P = rows_of_slots(gates, index)
    dh, ag, dgates_P = kernels.backward_hidden(
        dy_TD, index.tokens, index.offsets, gates_P, h, weights.w2, weights.b2, activation, hiddens.a
    )
    return Upstream(dh, ag, gates_P), slots_of_rows(dgates_P, index, gates.dtype)


def input_gradient(kernels: ModuleType, up: Upstream, index: Index, weights: Weights) -> Tensor:
    """dX [T, D]: the K rows of a token summed in fp32 in slot order."""
    dxr_PD = kernels.input_grad(up.dh, index.offsets, weights.w1, weights.w3)
    dx_TD: Tensor = kernels.combine(dxr_PD, index.map, None, index.token_offsets)
    return dx_TD


def weight_gradient(
    kernels: ModuleType, name: str, up: Upstream, x_TD: Tensor | None, dy_TD: Tensor, index: Index, out: Tensor, accumulate: bool
) -> None:
    """(Add) one weight's gradient into ``out``; name is a field of :class:`Weights`."""
    F = up.ag.size(1)
    half = up.dh[:, F:] if name in ("w3", "b3") else up.dh[:, :F]
    if name in ("w1", "w3"):
        kernels.weight_grad_rows(half, x_TD, None, index.tokens, index.offsets, out, accumulate)
    elif name == "w2":
        kernels.weight_grad_rows(dy_TD, up.ag, index.tokens, None, index.offsets, out, accumulate)
    elif name in ("b1", "b3"):
        kernels.bias_grad_rows(half, None, None, index.offsets, out, accumulate)
    else:
        kernels.bias_grad_rows(dy_TD, index.tokens, up.gates_P, index.offsets, out, accumulate)


LAYOUTS = ("split", "concat", "interleaved")


class Piece(NamedTuple):
    """One chunk of tokens: its token range, its range in the saved rows, and its own queue."""

    tokens: slice
    rows: slice
    queue: Index


def weight_views(weights: Weights, layout: str) -> Weights:
    """The split-layout views of weights that hold gate and up in one tensor (w1 = w13, b1 = b13). No copy.

    ``concat`` has the F gate rows first, ``interleaved`` has gate and up rows in turn (GPT-OSS).
    """
    if layout == "split":
        return weights
    F = weights.w1.size(1) // 2

    def cut(t: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        if t is None:
            return None, None
        return (t[:, :F], t[:, F:]) if layout == "concat" else (t[:, 0::2], t[:, 1::2])

    w1, w3 = cut(weights.w1)
    b1, b3 = cut(weights.b1)
    assert w1 is not None
    return Weights(w1, w3, weights.w2, b1, b3, weights.b2)


def pieces(kernels: ModuleType, index: Index, expert_indices_TK: Tensor | None, chunk_tokens: int) -> list[Piece]:
    """The whole queue as one piece, or one queue per ``chunk_tokens`` tokens (rebuilt, never saved)."""
    if chunk_tokens <= 0 or expert_indices_TK is None or expert_indices_TK.size(0) <= chunk_tokens:
        return [Piece(slice(None), slice(None), index)]
    T, K = expert_indices_TK.shape
    E = index.offsets.numel() - 1
    out = []
    for t0 in range(0, T, chunk_tokens):
        t1 = min(t0 + chunk_tokens, T)
        tokens, offsets, map_TK, _ = kernels.build_queue(expert_indices_TK[t0:t1], E)
        out.append(Piece(slice(t0, t1), slice(t0 * K, t1 * K), Index(tokens, offsets, map_TK)))
    return out


def forward_pieces(
    kernels: ModuleType, x_TD: Tensor, gates: Tensor, parts: list[Piece], weights: Weights, activation: str, save: str
) -> tuple[Tensor, Hiddens]:
    """:func:`forward` over all chunks; what is kept is one tensor each, [P, ...]."""
    if len(parts) == 1:
        return forward(kernels, x_TD, gates, parts[0].queue, weights, activation, save)
    y_TD = x_TD.new_empty(x_TD.size(0), weights.w2.size(1))
    whole = Hiddens()
    P = sum(p.queue.tokens.numel() for p in parts)
    for part in parts:
        y, kept = forward(kernels, x_TD[part.tokens], gates[part.tokens], part.queue, weights, activation, save)
        y_TD[part.tokens] = y
        if whole.h is None and kept.h is not None:
            whole = Hiddens(kept.h.new_empty(P, kept.h.size(1)), None if kept.a is None else kept.a.new_empty(P, kept.a.size(1)))
        for store, value in zip(whole, kept, strict=True):
            if store is not None and value is not None:
                store[part.rows] = value
    return y_TD, whole


def take(hiddens: Hiddens, part: Piece) -> Hiddens:
    """The rows of one chunk."""
    return Hiddens(*(None if t is None else t[part.rows] for t in hiddens))
