"""The whole expert MLP in plain PyTorch, block by block: what the reference backend runs for one call of the layer.

A block's gathered tokens, pre-activations and products stay in cache, so no [P, F] tensor exists besides what ``save`` keeps.
Every step is the one of :mod:`torchmoe.kernels.reference` on the same blocks, so both give the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchmoe.kernels.activations import activate
from torchmoe.kernels.blocks import GradSink, RowBlocks, Scratch, experts_of, project, store
from torchmoe.kernels.reference import UpWeights, combine, hidden_backward, input_grad_block
from torchmoe.kernels.scheme import Hiddens, Problem, rows_of_slots, slots_of_rows

__all__ = ["backward", "forward"]


def forward(x_TD: Tensor, gates: Tensor, problem: Problem) -> tuple[Tensor, Hiddens]:
    """See :func:`torchmoe.kernels.mlp.forward`."""
    index, w, activation, save = problem
    P, (E, D, F) = index.tokens.numel(), w.w2.shape
    kept = Hiddens(
        x_TD.new_empty(P, F) if save in ("half", "preact", "all") else None,
        x_TD.new_empty(P, F) if save in ("preact", "all") and w.w3 is not None else None,
        x_TD.new_empty(P, F) if save == "all" else None,
    )
    y_PD = x_TD.new_empty(P, D)
    scratch, rows = Scratch(x_TD.device, x_TD.dtype), RowBlocks(index.offsets)
    up_weights = UpWeights(w.w1, w.w3, w.b1, w.b3)
    w2, b2 = experts_of(w.w2, E), experts_of(w.b2, E)
    blocks = zip(rows.blocks, *map(rows.cut, (index.tokens, *kept, y_PD)), strict=True)
    for (e, *_), tokens_N, gate_out, up_out, a_out, y_out in blocks:
        h = up_weights.hidden_block(scratch, scratch.gather("x", x_TD, tokens_N), e, gate_out, up_out)
        a_NF = scratch.output("a", a_out, tokens_N.numel(), F)
        activate(*h, activation, out=a_NF)
        scratch.round_(a_NF)
        if a_out is not None:
            store(a_out, a_NF)
        y_ND = scratch.output("y", y_out, tokens_N.numel(), D)
        project(a_NF, scratch.wide("w", w2[e]), b2[e], y_ND)
        store(y_out, y_ND)
    return combine(y_PD, index.map, gates, index.token_offsets), kept


def backward(
    dy_TD: Tensor,
    x_TD: Tensor | None,
    gates: Tensor,
    problem: Problem,
    hiddens: Hiddens,
    *,
    need_x: bool,
    grads: dict[str, Tensor],
    accumulate: bool,
) -> tuple[Tensor | None, Tensor]:
    """See :func:`torchmoe.kernels.mlp.backward`."""
    index, w, activation, save = problem
    E = w.w2.size(0)
    scratch, rows = Scratch(dy_TD.device, dy_TD.dtype), RowBlocks(index.offsets)
    gates_P = rows_of_slots(gates, index)
    dgates_P = torch.empty_like(gates_P, dtype=torch.promote_types(scratch.dtype, gates_P.dtype))
    dxr_PD = dy_TD.new_empty(gates_P.numel(), w.w1.size(2)) if need_x else None
    sinks = {name: GradSink(out, accumulate, scratch, name, rows) for name, out in grads.items()}
    reads_x = save in ("input", "half") or not sinks.keys().isdisjoint(("w1", "w3"))
    up_weights = UpWeights(w.w1, w.w3, w.b1, w.b3)
    w1, w3, w2, b2 = (experts_of(t, E) for t in (w.w1, w.w3, w.w2, w.b2))
    blocks = zip(rows.blocks, *map(rows.cut, (index.tokens, gates_P, dgates_P, *hiddens, dxr_PD)), strict=True)
    for block, tokens_N, gates_N, dgates_N, gate_NF, up_NF, a_NF, dxr_ND in blocks:
        e = block.expert
        x_ND = scratch.gather("x", x_TD, tokens_N) if reads_x and x_TD is not None else scratch.take("x", 0, 0)
        if save == "input":
            gate_NF, up_NF = up_weights.hidden_block(scratch, x_ND, e, None, None)
        elif save == "half":
            up_NF = up_weights.up_half(scratch, x_ND, e)
        dy_ND = scratch.gather("dy", dy_TD, tokens_N)
        w2_DF = scratch.wide("w", w2[e])
        dh, ag_NF = hidden_backward(scratch, dy_ND, (gate_NF, up_NF), a_NF, gates_N, w2_DF, b2[e], activation, dgates_N)
        if dxr_ND is not None:
            input_grad_block(scratch, dh, w1[e], w3[e], dxr_ND)
        for name, sink in sinks.items():
            half_NF = dh[1] if name in ("w3", "b3") and dh[1] is not None else dh[0]
            if name == "w2":
                sink.add_product(block, dy_ND, ag_NF)
            elif name == "b2":
                sink.add_rows(block, dy_ND, gates_N)
            elif name in ("w1", "w3"):
                sink.add_product(block, half_NF, x_ND)
            else:
                sink.add_rows(block, half_NF, None)
    dx_TD = None if dxr_PD is None else combine(dxr_PD, index.map, None, index.token_offsets)
    return dx_TD, slots_of_rows(dgates_P, index, gates.dtype)
