"""The kernels of the expert MLP in plain PyTorch: any device, any floating dtype. The Triton backend mirrors these functions.

Letters: T tokens, K slots a token, P rows of the queue (T*K, or ``max_rows``), E experts, D model width, F expert width,
N rows of a block. H and dH are pairs (gate, up) of [P, F]; up is None without a gated unit.
Rows at or past ``expert_token_offsets[E]`` do not exist: they are neither read nor written. Sums run in fp32 (fp64 for fp64
inputs) and are rounded once to the storage dtype. Every output element is written by one owner in a fixed order, so two runs
are bit-equal. Nothing here knows autograd; :mod:`torchmoe.kernels.ops` does.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from torchmoe.kernels.activations import activate, activate_backward
from torchmoe.kernels.blocks import GradSink, RowBlocks, Scratch, accumulation_dtype, experts_of, project, store
from torchmoe.kernels.scheme import Halves

__all__ = [
    "backward_hidden",
    "bias_grad_rows",
    "build_queue",
    "combine",
    "down_projection",
    "input_grad",
    "up_projection",
    "weight_grad_rows",
]


def build_queue(expert_ids_TK: Tensor, num_experts: int, max_rows: int | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Group the (token, slot) pairs by expert; rows by expert ascending, then token, then slot.

    Ids outside [0, E) count as dropped. Rows that do not fit in ``max_rows`` are dropped too and reported by the flag.

    Returns:
        expert_token_indices_P: int32, token of each row; -1 where no row is.
        expert_token_offsets_E1: int32, expert e owns rows [offsets[e], offsets[e+1]).
        token_index_map_TK: int32, row of each slot; -1 = dropped.
        overflowed: bool [1].
    """
    T, K = expert_ids_TK.shape
    device, slots = expert_ids_TK.device, expert_ids_TK.numel()
    P = slots if max_rows is None else max_rows
    flat = expert_ids_TK.reshape(-1)
    # One spare bin behind the experts collects what is dropped; a stable sort keeps token and slot order inside a bin.
    key = torch.where((flat >= 0) & (flat < num_experts), flat, num_experts).to(torch.int32)
    order = torch.argsort(key, stable=True)
    counts = torch.zeros(num_experts + 1, dtype=torch.int32, device=device)
    counts.scatter_add_(0, key.long(), torch.ones_like(key))
    offsets = torch.zeros(num_experts + 1, dtype=torch.int32, device=device)
    torch.cumsum(counts[:-1], 0, dtype=torch.int32, out=offsets[1:])
    row = torch.empty(slots, dtype=torch.int32, device=device)
    row[order] = torch.arange(slots, dtype=torch.int32, device=device)
    kept = offsets[-1]
    overflowed = (kept > P).reshape(1)
    token_index_map = torch.where((row < kept) & (row < P), row, -1).reshape(T, K)
    indices = torch.full((P,), -1, dtype=torch.int32, device=device)
    head = (order[:P] // max(K, 1)).to(torch.int32)
    exists = torch.arange(head.numel(), dtype=torch.int32, device=device) < kept
    indices[: head.numel()] = torch.where(exists, head, -1)
    return indices, offsets.clamp(max=P), token_index_map, overflowed


def up_projection(
    x_TD: Tensor,
    expert_token_indices_P: Tensor,
    expert_token_offsets_E1: Tensor,
    w1_EFD: Tensor,
    w3_EFD: Tensor | None,
    b1_EF: Tensor | None,
    b3_EF: Tensor | None,
    activation: str,
    save_hidden: bool,
    gate_only: bool = False,
) -> tuple[Tensor, Halves | None]:
    """H = X[indices] W^T + b per expert, A = act(H) from H rounded to the storage dtype.

    Returns:
        a_PF, and the halves of H (``gate_only``: the gate's alone) or None.
    """
    P, F = expert_token_indices_P.numel(), w1_EFD.size(1)
    a_PF = x_TD.new_empty(P, F)
    gate_PF = torch.empty_like(a_PF) if save_hidden else None
    up_PF = torch.empty_like(a_PF) if save_hidden and not gate_only and w3_EFD is not None else None
    up_weights = UpWeights(w1_EFD, w3_EFD, b1_EF, b3_EF)
    scratch, rows = Scratch(x_TD.device, x_TD.dtype), RowBlocks(expert_token_offsets_E1)
    blocks = zip(rows.blocks, *map(rows.cut, (expert_token_indices_P, a_PF, gate_PF, up_PF)), strict=True)
    for (e, *_), tokens_N, a_out, gate_out, up_out in blocks:
        h = up_weights.hidden_block(scratch, scratch.gather("x", x_TD, tokens_N), e, gate_out, up_out)
        a_NF = scratch.output("a", a_out, a_out.size(0), F)
        activate(*h, activation, out=a_NF)
        store(a_out, a_NF)
    return a_PF, None if gate_PF is None else (gate_PF, up_PF)


class UpWeights:
    """The up-projections by expert: gate (or only) and up, with their biases."""

    def __init__(self, w1_EFD: Tensor, w3_EFD: Tensor | None, b1_EF: Tensor | None, b3_EF: Tensor | None) -> None:
        E = w1_EFD.size(0)
        self.F = w1_EFD.size(1)
        self._of = list(zip(*(experts_of(w, E) for w in (w1_EFD, w3_EFD, b1_EF, b3_EF)), strict=True))

    def hidden_block(self, scratch: Scratch, x_ND: Tensor, e: int, gate_out: Tensor | None, up_out: Tensor | None) -> Halves:
        """H of a block of expert e, rounded to the storage dtype; stored in the outputs given and computed there where it can."""
        w1, w3, b1, b3 = self._of[e]
        assert w1 is not None
        gate_NF = self.half(scratch, "gate", x_ND, w1, b1, gate_out)
        return gate_NF, None if w3 is None else self.half(scratch, "up", x_ND, w3, b3, up_out)

    def up_half(self, scratch: Scratch, x_ND: Tensor, e: int) -> Tensor:
        """The up half of :meth:`hidden_block` alone, to the same bits."""
        _, w3, _, b3 = self._of[e]
        assert w3 is not None
        return self.half(scratch, "up", x_ND, w3, b3, None)

    def half(self, scratch: Scratch, name: str, x_ND: Tensor, w_FD: Tensor, b_F: Tensor | None, out: Tensor | None) -> Tensor:
        half_NF = scratch.output(name, out, x_ND.size(0), self.F)
        project(x_ND, scratch.wide("w", w_FD), b_F, half_NF)
        scratch.round_(half_NF)
        if out is not None:
            store(out, half_NF)
        return half_NF


def down_projection(a_PF: Tensor, expert_token_offsets_E1: Tensor, w2_EDF: Tensor, b2_ED: Tensor | None) -> Tensor:
    """Y = A W2^T + b2 per expert, [P, D]."""
    E, D, _ = w2_EDF.shape
    y_PD = a_PF.new_empty(a_PF.size(0), D)
    w2, b2 = experts_of(w2_EDF, E), experts_of(b2_ED, E)
    scratch, rows = Scratch(a_PF.device, a_PF.dtype), RowBlocks(expert_token_offsets_E1)
    for (e, *_), a_NF, out_ND in zip(rows.blocks, rows.cut(a_PF), rows.cut(y_PD), strict=True):
        y_ND = scratch.output("y", out_ND, out_ND.size(0), D)
        project(scratch.rows("a", a_NF), scratch.wide("w", w2[e]), b2[e], y_ND)
        store(out_ND, y_ND)
    return y_PD


def combine(y_PD: Tensor, token_index_map: Tensor, gates: Tensor | None, token_offsets_T1: Tensor | None = None) -> Tensor:
    """y[t] = sum over the slots of t, in slot order, of gate * row; a dropped slot (-1) adds nothing.

    ``token_index_map`` and ``gates`` are [T, K]; with ``token_offsets_T1`` they are [P'] and token t owns
    [token_offsets[t], token_offsets[t+1]) of them (ragged top-k, expert choice).
    """
    wide = accumulation_dtype(y_PD.dtype if gates is None else torch.promote_types(y_PD.dtype, gates.dtype))
    slots = token_index_map.reshape(-1)
    if token_offsets_T1 is None:
        T, K = token_index_map.shape
        ends = torch.arange(T + 1, device=slots.device) * K
    else:
        T, ends = token_offsets_T1.numel() - 1, token_offsets_T1.long()
    weight = None if gates is None else gates.reshape(-1).to(wide)
    # embedding_bag is torch's ordered sum of gathered, weighted rows. It reads every row it is told, so dropped slots leave
    # its list.
    kept = slots >= 0
    if not bool(kept.all()):
        before = torch.zeros(slots.numel() + 1, dtype=torch.int64, device=slots.device)
        torch.cumsum(kept, 0, out=before[1:])
        ends, slots = before[ends], slots[kept]
        weight = None if weight is None else weight[kept]
    if slots.numel() == 0 or T == 0:
        return y_PD.new_zeros(T, y_PD.size(1))
    out = torch.nn.functional.embedding_bag(
        slots.long(), y_PD.to(wide), ends, mode="sum", per_sample_weights=weight, include_last_offset=True
    )
    return out.to(y_PD.dtype)


def backward_hidden(
    dy_TD: Tensor,
    expert_token_indices_P: Tensor,
    expert_token_offsets_E1: Tensor,
    gates_P: Tensor,
    h: Halves,
    w2_EDF: Tensor,
    b2_ED: Tensor | None,
    activation: str,
    a_PF: Tensor | None = None,
) -> tuple[Halves, Tensor, Tensor]:
    """One GEMM dA' = dO W2, then A = act(H), ds = <dA', A> (+ <dO, b2>), dH = s dA' act'(H), A' = s A.

    Moving W2 to the other side of <dO, A W2^T> = <dO W2, A> gives the gate gradient without keeping Y.

    Args:
        gates_P: gate of each row, fp32 or fp64.
        h: halves of the pre-activations in their storage dtype.
        a_PF: A where it was saved; else it is recomputed from ``h``, to the same bits.

    Returns:
        the halves of dH, gated A' [P, F], dgates [P] in fp32 (fp64).
    """
    E, _, F = w2_EDF.shape
    ag_PF = dy_TD.new_empty(expert_token_indices_P.numel(), F)
    dgate_PF = torch.empty_like(ag_PF)
    dup_PF = None if h[1] is None else torch.empty_like(ag_PF)
    scratch, rows = Scratch(dy_TD.device, dy_TD.dtype), RowBlocks(expert_token_offsets_E1)
    dgates_P = torch.empty(ag_PF.size(0), dtype=torch.promote_types(scratch.dtype, gates_P.dtype), device=dy_TD.device)
    w2, b2 = experts_of(w2_EDF, E), experts_of(b2_ED, E)
    blocks = zip(
        rows.blocks,
        *map(rows.cut, (expert_token_indices_P, gates_P, *h, a_PF, dgates_P, dgate_PF, dup_PF, ag_PF)),
        strict=True,
    )
    for (e, *_), tokens_N, gates_N, gate_NF, up_NF, a_NF, dgates_N, dgate_out, dup_out, ag_out in blocks:
        dy_ND = scratch.gather("dy", dy_TD, tokens_N)
        dh, ag_NF = hidden_backward(
            scratch, dy_ND, (gate_NF, up_NF), a_NF, gates_N, scratch.wide("w", w2[e]), b2[e], activation, dgates_N
        )
        store(dgate_out, dh[0])
        if dup_out is not None and dh[1] is not None:
            store(dup_out, dh[1])
        store(ag_out, ag_NF)
    return (dgate_PF, dup_PF), ag_PF, dgates_P


def hidden_backward(
    scratch: Scratch,
    dy_ND: Tensor,
    h: Halves,
    a_NF: Tensor | None,
    gates_N: Tensor,
    w2_DF: Tensor,
    b2_D: Tensor | None,
    activation: str,
    out_dgates: Tensor,
) -> tuple[Halves, Tensor]:
    """The equations of :func:`backward_hidden` on one block of saved rows: dH and A' in scratch, rounded to the storage dtype."""
    N, F = dy_ND.size(0), w2_DF.size(1)
    gate_NF, up_NF = scratch.wide("gate", h[0]), None if h[1] is None else scratch.wide("up", h[1])
    da_NF, ag_NF, value_NF = (scratch.take(name, N, F) for name in ("da", "a", "value"))
    torch.mm(dy_ND, w2_DF, out=da_NF)
    activate(gate_NF, up_NF, activation, out=ag_NF, value=value_NF)
    if a_NF is not None:
        ag_NF.copy_(a_NF)
    scratch.round_(ag_NF)
    ds_N = torch.linalg.vecdot(da_NF, ag_NF)
    if b2_D is not None:
        ds_N += torch.mv(dy_ND, b2_D.to(scratch.dtype))
    out_dgates.copy_(ds_N)
    s_N1 = gates_N.to(scratch.dtype)[:, None]
    dgate_NF, dup_NF = activate_backward(gate_NF, up_NF, value_NF, da_NF.mul_(s_N1), activation)
    dh = scratch.round_(dgate_NF), None if dup_NF is None else scratch.round_(dup_NF)
    return dh, scratch.round_(ag_NF.mul_(s_N1))


def input_grad(dh: Halves, expert_token_offsets_E1: Tensor, w1_EFD: Tensor, w3_EFD: Tensor | None) -> Tensor:
    """dX~ = dH W1 (gate half) + dH W3 (up half), [P, D]; summed per token by :func:`combine` without gates."""
    dxr_PD = dh[0].new_empty(dh[0].size(0), w1_EFD.size(2))
    scratch, rows = Scratch(dxr_PD.device, dxr_PD.dtype), RowBlocks(expert_token_offsets_E1)
    w1, w3 = experts_of(w1_EFD, w1_EFD.size(0)), experts_of(w3_EFD, w1_EFD.size(0))
    for (e, *_), dgate_NF, dup_NF, out_ND in zip(rows.blocks, *map(rows.cut, (*dh, dxr_PD)), strict=True):
        block = scratch.rows("dgate", dgate_NF), None if dup_NF is None else scratch.rows("dup", dup_NF)
        input_grad_block(scratch, block, w1[e], w3[e], out_ND)
    return dxr_PD


def input_grad_block(scratch: Scratch, dh: Halves, w1_FD: Tensor, w3_FD: Tensor | None, out_ND: Tensor) -> None:
    """dX~ of one block into ``out_ND``."""
    dgate_NF, dup_NF = dh
    dx_ND = scratch.output("dx", out_ND, out_ND.size(0), out_ND.size(1))
    torch.mm(dgate_NF, scratch.wide("w", w1_FD), out=dx_ND)
    if dup_NF is not None and w3_FD is not None:
        dx_ND.addmm_(dup_NF, scratch.wide("w", w3_FD))
    store(out_ND, dx_ND)


def weight_grad_rows(
    left: Tensor,
    right: Tensor,
    left_indices_P: Tensor | None,
    right_indices_P: Tensor | None,
    expert_token_offsets_E1: Tensor,
    out: Tensor,
    accumulate: bool = True,
) -> Tensor:
    """out[e] (+)= left[rows of e]^T right[rows of e]; a given index list gathers the rows of that side in the reduction.

    dW1 = weight_grad_rows(dh, x, None, indices, ...), dW2 = weight_grad_rows(dy, a_gated, indices, None, ...).
    ``accumulate=False`` overwrites, with exact zeros for experts without rows. ``out`` [E, left columns, right columns] may be
    a strided view and of any floating dtype; it is rounded once.
    """
    scratch, rows = Scratch(left.device, left.dtype), RowBlocks(expert_token_offsets_E1)
    sink = GradSink(out, accumulate, scratch, "w", rows)
    sides = _rows(scratch, "left", left, left_indices_P, rows), _rows(scratch, "right", right, right_indices_P, rows)
    for block, left_NL, right_NR in zip(rows.blocks, *sides, strict=True):
        sink.add_product(block, left_NL, right_NR)
    return out


def bias_grad_rows(
    rows: Tensor,
    indices_P: Tensor | None,
    scale_P: Tensor | None,
    expert_token_offsets_E1: Tensor,
    out: Tensor,
    accumulate: bool = True,
) -> Tensor:
    """out[e] (+)= sum over the rows of e of scale * row: db1, db3 (no scale) and db2 = sum of gate * dO."""
    scratch, cut = Scratch(rows.device, rows.dtype), RowBlocks(expert_token_offsets_E1)
    sink = GradSink(out, accumulate, scratch, "b", cut)
    for block, rows_NC, scale_N in zip(cut.blocks, _rows(scratch, "rows", rows, indices_P, cut), cut.cut(scale_P), strict=True):
        sink.add_rows(block, rows_NC, scale_N)
    return out


def _rows(scratch: Scratch, name: str, values: Tensor, indices_P: Tensor | None, rows: RowBlocks) -> Iterator[Tensor]:
    """The rows of each block, gathered by an index list or in place."""
    if indices_P is None:
        return (scratch.rows(name, block) for block in rows.cut(values))
    return (scratch.gather(name, values, indices_N) for indices_N in rows.cut(indices_P))
