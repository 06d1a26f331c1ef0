"""What the split form of the expert MLP keeps between forward, input gradient and weight gradient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torchmoe.errors import ConfigError
from torchmoe.kernels import mlp, scheme
from torchmoe.kernels.blocks import accumulation_dtype

__all__ = ["ExpertSaved", "ExpertWeightWork", "grad_buffer"]


@dataclass
class ExpertSaved:
    """What ``FusedExpertMLP.forward_saved`` keeps for the backward; :meth:`tensors` lists it."""

    x_TD: Tensor
    gates: Tensor
    parts: list[scheme.Piece]
    hiddens: scheme.Hiddens
    save: str
    pair_order: Tensor | None = None

    def tensors(self) -> list[Tensor]:
        """Every tensor held, weights excluded."""
        index = [t for p in self.parts for t in p.queue]
        return [t for t in (self.x_TD, self.gates, *index, *self.hiddens, self.pair_order) if t is not None]


@dataclass
class ExpertWeightWork:
    """The weight gradients of one unit. It holds x, dy, dH, A' and the queue until :meth:`run`, which may be called once.

    Args:
        buffers: gives the gradient buffers by short weight name; asked for in :meth:`run`.
    """

    buffers: Callable[[], dict[str, Tensor]]
    kernels: ModuleType
    x_TD: Tensor
    dy_TD: Tensor
    rows: list[tuple[scheme.Piece, mlp.Upstream]] = field(default_factory=list)
    done: bool = False

    def run(self) -> None:
        """Add the gradients of every weight that requires one to its fp32 (fp64) ``.grad``, creating it at first."""
        if self.done:
            raise ConfigError("WeightWork.run was called twice on one unit; its gradients are already added, build a new one")
        with torch.no_grad():
            buffers = self.buffers()
            for part, up in self.rows:
                x, dy = self.x_TD[part.tokens], self.dy_TD[part.tokens]
                for name, out in buffers.items():
                    mlp.weight_gradient(self.kernels, name, up, x, dy, part.queue, out, True)
        self.done = True
        self.rows.clear()
        del self.x_TD, self.dy_TD

    def tensors(self) -> list[Tensor]:
        """Every tensor held until :meth:`run`."""
        if self.done:
            return []
        rows = [t for part, up in self.rows for t in (*up.dh, up.ag, up.gates_P, *part.queue) if t is not None]
        return [self.x_TD, self.dy_TD, *rows]


def grad_buffer(parameter: nn.Parameter) -> Tensor:
    """The local tensor of ``parameter.grad``, created as zeros in the accumulation dtype (fp32; fp64 for fp64)."""
    if parameter.grad is None:
        wide = accumulation_dtype(parameter.dtype)
        if wide != parameter.dtype:
            parameter.grad_dtype = wide
        parameter.grad = torch.zeros_like(parameter, dtype=wide, memory_format=torch.contiguous_format)
    grad = parameter.grad
    return grad.to_local() if isinstance(grad, DTensor) else grad
