"""The stage contract: what the runner asks of the model's parts. Any object with these methods is a stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from torchmoe.pipeline.action import Op
from torchmoe.router import Routing

__all__ = [
    "AttentionOutput",
    "AttentionStage",
    "Embedding",
    "ExpertStage",
    "HeadStage",
    "MicroBatch",
    "RidingExpertStage",
    "Stages",
    "WeightWork",
]


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch as one rank sees it.

    Args:
        index: its number in the step.
        lengths: tokens of EVERY sequence of the global micro-batch (all replicas), by global sequence index.
        inputs: this rank's positional inputs (tokens first) on the embedding's group.
        kwargs: this rank's keyword inputs (positions, masks), for all attention groups.
        target: this rank's labels on the head's group.
        loss_kwargs: what the loss needs of the whole step (e.g. the global number of valid tokens).
    """

    index: int
    lengths: tuple[int, ...]
    inputs: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    target: Any = None
    loss_kwargs: Mapping[str, Any] = field(default_factory=dict)


class AttentionOutput(NamedTuple):
    """``res_TD`` goes on as the residual, ``x_TD`` and ``routing`` to the experts (with residual='ride' ``res_TD`` is h)."""

    res_TD: Tensor
    x_TD: Tensor
    routing: Routing


class Embedding(Protocol):
    def __call__(self, mb: MicroBatch) -> Tensor:
        """Hidden states h_TD of this rank's sequences, sequence by sequence."""


class AttentionStage(Protocol):
    """h = res + attention(norm(res)); x = ffn_norm(h); routing = router(x); res' = h (+ shared(x)). Dense layers may precede."""

    def __call__(self, res_TD: Tensor, mb: MicroBatch) -> AttentionOutput: ...


class HeadStage(Protocol):
    def __call__(self, res_TD: Tensor, mb: MicroBatch) -> Tensor:
        """Scalar loss of this rank's sequences, already divided by whatever is global: ranks and micro-batches add up."""


class WeightWork(Protocol):
    """The weight gradients of one unit, still to be accumulated. It owns the tensors they need until :meth:`run`."""

    def run(self) -> None: ...


class ExpertStage(Protocol):
    """Routed experts of one layer on one F rank, with an explicit split backward (no autograd graph is kept)."""

    def forward_saved(self, rows_RD: Tensor, ids_RK: Tensor, gates_RK: Tensor) -> tuple[Tensor, Any]:
        """Partial sums y_RD over this rank's experts (gates applied), and what backward needs.

        ``ids_RK`` are LOGICAL expert ids; slots of other owners and -1 count nothing.
        """

    def backward_input(self, saved: Any, dy_RD: Tensor) -> tuple[Tensor, Tensor, WeightWork]:
        """(dx_RD, dgates_RK, weight gradients to run later). dgates are 0 in slots of other owners."""


class RidingExpertStage(Protocol):
    """An expert stage of residual='ride': rows carry h, and rows whose primary this rank is get the residual added.

    :class:`~torchmoe.pipeline.runtime.ride.RideExperts` makes one of an :class:`ExpertStage`, ffn_norm and shared experts.
    """

    def forward_saved(self, h_RD: Tensor, ids_RK: Tensor, gates_RK: Tensor, primary_R: Tensor) -> tuple[Tensor, Any]: ...

    def backward_input(self, saved: Any, dy_RD: Tensor) -> tuple[Tensor, Tensor, WeightWork]: ...


@dataclass
class Stages:
    """The parts of the model that live on this rank, by MoE layer.

    With residual='ride' the experts are riding stages. ``hooks`` run UNSHARD, RESHARD
    and REDUCE_GRAD actions, called with the unit's number.
    """

    attention: Mapping[int, AttentionStage] = field(default_factory=dict)
    experts: Mapping[int, ExpertStage | RidingExpertStage] = field(default_factory=dict)
    embedding: Embedding | None = None
    head: HeadStage | None = None
    hooks: Mapping[Op, Callable[[int], None]] = field(default_factory=dict)
