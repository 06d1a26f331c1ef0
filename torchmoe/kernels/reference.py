"""The kernels of the expert MLP in plain PyTorch: any device, any floating dtype. The Triton backend mirrors these functions.

Letters: T tokens, K slots a token, P rows of the queue (T*K, or ``max_rows``), E experts, D model width, F expert width,
G columns of H (2F with a gated unit, else F), N rows of a block.
Rows at or past ``expert_token_offsets[E]`` do not exist: they are neither read nor written. Sums run in fp32 (fp64 for fp64
inputs) and are rounded once to the storage dtype. Every output element is written by one owner in a fixed order, so two runs
are bit-equal. Nothing here knows autograd; :mod:`torchmoe.kernels.ops` does.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchmoe.kernels.activations import activate, activate_backward
from torchmoe.kernels.blocks import GradSink, Scratch, accumulation_dtype, blocks, cut, project, segments, store

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

Hidden = Tensor | tuple[Tensor, Tensor]
"""Pre-activations: one tensor [P, G] (gate columns first) or the pair (gate [P, F], up [P, F])."""


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
) -> tuple[Tensor, Tensor | None]:
    """H = X[indices] W^T + b per expert, A = act(H) from H rounded to the storage dtype.

    Returns:
        a_PF, and h [P, G] (``gate_only``: the gate columns [P, F] alone) or None.
    """
    P, F = expert_token_indices_P.numel(), w1_EFD.size(1)
    a_PF = x_TD.new_empty(P, F)
    h = x_TD.new_empty(P, F if gate_only or w3_EFD is None else 2 * F) if save_hidden else None
    scratch = Scratch(x_TD.device, x_TD.dtype)
    for e, rows in blocks(expert_token_offsets_E1):
        x_ND = scratch.gather("x", x_TD, expert_token_indices_P[rows])
        target = None if h is None or gate_only else h[rows]
        h_NG = hidden_block(scratch, x_ND, e, w1_EFD, w3_EFD, b1_EF, b3_EF, target)
        if h is not None:
            store(h[rows], h_NG[:, : h.size(1)])
        a_NF = scratch.output("a", a_PF[rows], x_ND.size(0), F)
        activate(h_NG, activation, out=a_NF)
        store(a_PF[rows], a_NF)
    return a_PF, h


def hidden_block(
    scratch: Scratch,
    x_ND: Tensor,
    e: int,
    w1_EFD: Tensor,
    w3_EFD: Tensor | None,
    b1_EF: Tensor | None,
    b3_EF: Tensor | None,
    target: Tensor | None,
) -> Tensor:
    """H [N, G] of a block of expert e, rounded to the storage dtype; computed in ``target`` where that can be."""
    F = w1_EFD.size(1)
    h_NG = scratch.output("h", target, x_ND.size(0), F if w3_EFD is None else 2 * F)
    project(x_ND, scratch.wide("w", w1_EFD[e]), None if b1_EF is None else b1_EF[e], h_NG[:, :F])
    if w3_EFD is not None:
        project(x_ND, scratch.wide("w", w3_EFD[e]), None if b3_EF is None else b3_EF[e], h_NG[:, F:])
    return scratch.round_(h_NG)


def down_projection(a_PF: Tensor, expert_token_offsets_E1: Tensor, w2_EDF: Tensor, b2_ED: Tensor | None) -> Tensor:
    """Y = A W2^T + b2 per expert, [P, D]."""
    y_PD = a_PF.new_empty(a_PF.size(0), w2_EDF.size(1))
    scratch = Scratch(a_PF.device, a_PF.dtype)
    for e, rows in blocks(expert_token_offsets_E1):
        y_ND = scratch.output("y", y_PD[rows], rows.stop - rows.start, y_PD.size(1))
        project(scratch.rows("a", a_PF[rows]), scratch.wide("w", w2_EDF[e]), None if b2_ED is None else b2_ED[e], y_ND)
        store(y_PD[rows], y_ND)
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
    h: Hidden,
    w2_EDF: Tensor,
    b2_ED: Tensor | None,
    activation: str,
    a_PF: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """One GEMM dA' = dO W2, then A = act(H), ds = <dA', A> (+ <dO, b2>), dH = s dA' act'(H), A' = s A.

    Moving W2 to the other side of <dO, A W2^T> = <dO W2, A> gives the gate gradient without keeping Y.

    Args:
        gates_P: gate of each row, fp32 or fp64.
        h: pre-activations in their storage dtype.
        a_PF: A where it was saved; else it is recomputed from ``h``, to the same bits.

    Returns:
        dh [P, G] (also for a pair), gated A' [P, F], dgates [P] in fp32 (fp64).
    """
    P, F = expert_token_indices_P.numel(), w2_EDF.size(2)
    columns = 2 * F if isinstance(h, tuple) else h.size(1)
    dh, ag_PF = dy_TD.new_empty(P, columns), dy_TD.new_empty(P, F)
    scratch = Scratch(dy_TD.device, dy_TD.dtype)
    dgates_P = torch.empty(P, dtype=torch.promote_types(scratch.dtype, gates_P.dtype), device=dy_TD.device)
    for e, rows in blocks(expert_token_offsets_E1):
        dy_ND = scratch.gather("dy", dy_TD, expert_token_indices_P[rows])
        dh_NG = scratch.output("dh", dh[rows], dy_ND.size(0), columns)
        a_NF = hidden_backward(
            scratch,
            dy_ND,
            saved_hidden(scratch, h, rows),
            gates_P[rows],
            scratch.wide("w", w2_EDF[e]),
            None if b2_ED is None else b2_ED[e],
            activation,
            a_NF=None if a_PF is None else a_PF[rows],
            out_dh=dh_NG,
            out_dgates=dgates_P[rows],
        )
        store(dh[rows], dh_NG)
        store(ag_PF[rows], a_NF)
    return dh, ag_PF, dgates_P


def saved_hidden(scratch: Scratch, h: Hidden, rows: slice) -> Tensor:
    """Rows of saved pre-activations as one contiguous block in the accumulation dtype."""
    if not isinstance(h, tuple):
        return scratch.wide("h", h[rows])
    F = h[0].size(1)
    h_NG = scratch.take("h", rows.stop - rows.start, 2 * F)
    h_NG[:, :F] = h[0][rows]
    h_NG[:, F:] = h[1][rows]
    return h_NG


def hidden_backward(
    scratch: Scratch,
    dy_ND: Tensor,
    h_NG: Tensor,
    gates_N: Tensor,
    w2_DF: Tensor,
    b2_D: Tensor | None,
    activation: str,
    *,
    a_NF: Tensor | None,
    out_dh: Tensor,
    out_dgates: Tensor,
) -> Tensor:
    """The equations of :func:`backward_hidden` on one block; dH is written, A' is returned (rounded to the storage dtype)."""
    N, F = dy_ND.size(0), w2_DF.size(1)
    da_NF, ag_NF, value_NF = (scratch.take(name, N, F) for name in ("da", "a", "value"))
    torch.mm(dy_ND, w2_DF, out=da_NF)
    activate(h_NG, activation, out=ag_NF, value=value_NF)
    if a_NF is not None:
        ag_NF.copy_(a_NF)
    scratch.round_(ag_NF)
    ds_N = torch.linalg.vecdot(da_NF, ag_NF)
    if b2_D is not None:
        ds_N += torch.mv(dy_ND, b2_D.to(scratch.dtype))
    out_dgates.copy_(ds_N)
    s_N1 = gates_N.to(scratch.dtype)[:, None]
    activate_backward(h_NG, value_NF, da_NF.mul_(s_N1), activation, out=out_dh)
    scratch.round_(out_dh)
    return scratch.round_(ag_NF.mul_(s_N1))


def input_grad(dh: Tensor, expert_token_offsets_E1: Tensor, w1_EFD: Tensor, w3_EFD: Tensor | None) -> Tensor:
    """dX~ = dH W1 (gate columns) + dH W3 (up columns), [P, D]; summed per token by :func:`combine` without gates."""
    dxr_PD = dh.new_empty(dh.size(0), w1_EFD.size(2))
    scratch = Scratch(dh.device, dh.dtype)
    for e, rows in blocks(expert_token_offsets_E1):
        input_grad_block(scratch, scratch.rows("dh", dh[rows]), e, w1_EFD, w3_EFD, dxr_PD[rows])
    return dxr_PD


def input_grad_block(scratch: Scratch, dh_NG: Tensor, e: int, w1_EFD: Tensor, w3_EFD: Tensor | None, out_ND: Tensor) -> None:
    """dX~ of one block into ``out_ND``."""
    F = w1_EFD.size(1)
    dx_ND = scratch.output("dx", out_ND, dh_NG.size(0), out_ND.size(1))
    torch.mm(dh_NG[:, :F], scratch.wide("w", w1_EFD[e]), out=dx_ND)
    if w3_EFD is not None:
        dx_ND.addmm_(dh_NG[:, F:], scratch.wide("w", w3_EFD[e]))
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
    scratch = Scratch(left.device, left.dtype)
    sink = GradSink(out, accumulate, scratch, "w")
    for e, segment in segments(expert_token_offsets_E1):
        if sink.begin(e, segment):
            for rows in cut(segment):
                sink.add_product(
                    _rows(scratch, "left", left, left_indices_P, rows), _rows(scratch, "right", right, right_indices_P, rows)
                )
            sink.end(e)
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
    scratch = Scratch(rows.device, rows.dtype)
    sink = GradSink(out, accumulate, scratch, "b")
    for e, segment in segments(expert_token_offsets_E1):
        if sink.begin(e, segment):
            for block in cut(segment):
                scale = None if scale_P is None else scale_P[block].to(scratch.dtype)
                sink.add_rows(_rows(scratch, "rows", rows, indices_P, block), scale)
            sink.end(e)
    return out


def _rows(scratch: Scratch, name: str, values: Tensor, indices_P: Tensor | None, rows: slice) -> Tensor:
    return scratch.rows(name, values[rows]) if indices_P is None else scratch.gather(name, values, indices_P[rows])
