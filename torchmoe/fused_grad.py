"""The autograd form of the expert MLP whose backward adds the weights' gradients to ``.grad`` itself.

Autograd hands a weight's gradient over as a tensor of its own and then adds it to ``.grad``: with several micro-batches a step
that rewrites every dW for each of them, and holds all dW of the block at once. Here the kernels add into the fp32 buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from torchmoe.kernels import mlp, scheme
from torchmoe.kernels.backends import resolve

__all__ = ["expert_mlp_into_grad"]


class _ExpertMLPIntoGrad(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        gates: Tensor,
        index: scheme.Index,
        expert_indices: Tensor | None,
        weights: scheme.Weights,
        buffers: Callable[[], dict[str, Tensor]],
        options: tuple[str, str, int, str],
        *parameters: Tensor,
    ) -> Tensor:
        activation, save, chunk_tokens, backend = options
        kernels = resolve(backend, x_TD.device)
        parts = scheme.pieces(kernels, index, expert_indices, chunk_tokens)
        problem = scheme.Problem(index, weights, activation, save)
        y_TD, hiddens = mlp.forward_pieces(kernels, x_TD, gates, parts, problem)
        ctx.buffers, ctx.options = buffers, options
        ctx.save_for_backward(x_TD, gates, *index, expert_indices, *weights, *hiddens)
        return y_TD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TD: Tensor) -> tuple[Any, ...]:
        activation, save, chunk_tokens, backend = ctx.options
        x_TD, gates, *rest = ctx.saved_tensors
        index, expert_indices = scheme.Index(*rest[:4]), rest[4]
        kernels = resolve(backend, dy_TD.device)
        dx_TD, dgates = mlp.backward_pieces(
            kernels,
            dy_TD,
            x_TD,
            gates,
            scheme.pieces(kernels, index, expert_indices, chunk_tokens),
            scheme.Problem(index, scheme.Weights(*rest[5:11]), activation, save),
            scheme.Hiddens(*rest[11:]),
            need_x=ctx.needs_input_grad[0],
            grads=ctx.buffers(),
            accumulate=True,
        )
        nothing = (None,) * (len(ctx.needs_input_grad) - 2)
        return dx_TD, dgates if ctx.needs_input_grad[1] else None, *nothing


def expert_mlp_into_grad(
    x_TD: Tensor,
    gates: Tensor,
    index: scheme.Index,
    expert_indices: Tensor | None,
    weights: scheme.Weights,
    parameters: Sequence[Tensor],
    buffers: Callable[[], dict[str, Tensor]],
    *,
    activation: str,
    save: str,
    chunk_tokens: int,
    backend: str,
) -> Tensor:
    """y [T, D]; its backward gives autograd the gradients of x and the gates and adds the others into ``buffers()``.

    Args:
        weights: split-layout views in the dtype of the computation, without a graph.
        parameters: what makes y require a gradient where x and the gates do not; they receive none from autograd.
        buffers: gradient buffers by short weight name, asked for in the backward.
    """
    options = (activation, save, chunk_tokens, backend)
    y_TD: Tensor = _ExpertMLPIntoGrad.apply(x_TD, gates, index, expert_indices, weights, buffers, options, *parameters)  # type: ignore[no-untyped-call]
    return y_TD
