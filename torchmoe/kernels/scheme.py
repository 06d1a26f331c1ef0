"""The data that the expert MLP's forward and backward pass around: weights, queue tensors, what is saved, chunks of tokens."""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from torchmoe.kernels.blocks import accumulation_dtype

__all__ = [
    "LAYOUTS",
    "SAVE_MODES",
    "WEIGHTS",
    "Halves",
    "Hiddens",
    "Index",
    "Piece",
    "Problem",
    "Weights",
    "pieces",
    "rows_of_slots",
    "slots_of_rows",
    "take",
    "weight_views",
]

SAVE_MODES = ("input", "half", "preact", "all")
LAYOUTS = ("split", "concat", "interleaved")
WEIGHTS = ("w1", "w3", "w2", "b1", "b3", "b2")


Halves = tuple[Tensor, Tensor | None]
"""Pre-activations or their gradients: the gate's [P, F] and, with a gated unit, the up half's [P, F]."""


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


class Problem(NamedTuple):
    """What one forward and backward compute: an expert MLP over one queue, and what the forward keeps of it.

    ``save`` is a mode of ``SAVE_MODES`` or "none" (inference): keep nothing, write no pre-activations.
    """

    queue: Index
    weights: Weights
    activation: str
    save: str


class Hiddens(NamedTuple):
    """What a save mode keeps besides x, [P, F] each: the gate half, from "preact" on the up half of a gated unit, A in "all"."""

    gate: Tensor | None = None
    up: Tensor | None = None
    a: Tensor | None = None


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

    def cut(t: Tensor) -> tuple[Tensor, Tensor]:
        return (t[:, :F], t[:, F:]) if layout == "concat" else (t[:, 0::2], t[:, 1::2])

    w1, w3 = cut(weights.w1)
    b1, b3 = (None, None) if weights.b1 is None else cut(weights.b1)
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


def take(hiddens: Hiddens, part: Piece) -> Hiddens:
    """The rows of one chunk."""
    return Hiddens(*(None if t is None else t[part.rows] for t in hiddens))


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
    return picked.masked_fill_(index.map < 0, 0.0).to(dtype)
