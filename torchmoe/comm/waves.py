"""Experts that start on the rows of their own node while the rows of other nodes are still on the way.

One wave per source node, nearest first, one wave on the slow links at a time; results go back wave by wave, too. In backward
the gradients travel the same way, so both directions overlap with the experts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from torchmoe.comm.halo import BackFlow, HaloPlan, HierarchicalAllToAll, OutFlow
from torchmoe.comm.token_exchange import check_results
from torchmoe.errors import ConfigError

__all__ = ["Experts", "WaveRows", "Waves", "overlapped"]

Experts = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(rows [R, D], expert ids [R, K] with -1 for slots of other ranks, gates [R, K]) -> results [R, D]. R may be 0."""


@dataclass(frozen=True)
class WaveRows:
    """The rows of one wave on this rank, by source rank, then token.

    Args:
        index: -1 for the own node, then 0, 1, ... by distance.
        fields: what was sent: (rows, ids, gates) of a dispatch, (rows,) of a gradient.
    """

    index: int
    fields: tuple[Tensor, ...]


class Waves:
    """A dispatch and its combine, wave by wave, without autograd: iterate, :meth:`give` a result per wave, :meth:`finish`.

    Args:
        exchange: the hierarchical exchange.
        plan: ``exchange.plan(expert_ids, split=True)``.
        out: token fields, and what they are ("dispatch" or "d_combine").
        back: what returns ("combine" or "d_dispatch").
    """

    def __init__(self, exchange: HierarchicalAllToAll, plan: HaloPlan, out: Sequence[Tensor], kind: str, back: str) -> None:
        self._exchange, self._plan, self._kind = exchange, plan, back
        self._out = OutFlow(exchange, plan, kind, out)
        self._back: BackFlow | None = None
        self._given: list[int] = []
        self.waited: list[float] = []
        """Seconds this rank stood still: before each wave, and in :meth:`finish`."""

    def __iter__(self) -> Iterator[WaveRows]:
        lanes = range(self._exchange.topology.lanes)
        for w in range(-1, len(self._plan.waves)):
            start = time.perf_counter()
            if w >= 0:
                self._out.redistribute(w)
                self._out.post_wave()  # the link is free: the next wave travels while this one is computed
            rows = self._out.take(w)
            self.waited.append(time.perf_counter() - start)
            yield WaveRows(w, tuple(self._out.concat([rows[m][k] for m in sorted(rows) for k in lanes])))

    def give(self, wave: WaveRows, results: Sequence[Tensor]) -> None:
        """The results of a wave's rows; they travel while the next wave is computed. Waves are given in their order."""
        if wave.index != len(self._given) - 1 or results[0].shape[0] != wave.fields[0].shape[0]:
            raise ConfigError(
                f"wave {wave.index} with {results[0].shape[0]} results was given after {len(self._given)} waves; "
                f"give every wave once, in order, with one result for each of its {wave.fields[0].shape[0]} rows"
            )
        if self._back is None:
            self._back = BackFlow(self._exchange, self._plan, self._kind, results)
        lanes = range(self._exchange.topology.lanes)
        sources = self._back.nodes(wave.index)
        rows = [self._plan.final[k][m] for m in sources for k in lanes]
        blocks = iter(zip(*(torch.split(f, rows) for f in results), strict=True)) if rows else iter(())
        self._back.give(wave.index, {m: [list(next(blocks)) for _ in lanes] for m in sources})
        if self._given:  # by now the other lanes had a wave's time to answer
            self._back.advance(self._given[-1])
        self._given.append(wave.index)

    def finish(self) -> list[Tensor]:
        """Wait for all results: the sum per token, and per slot what was sent per slot."""
        if self._back is None or len(self._given) != len(self._plan.waves) + 1:
            raise ConfigError(f"{len(self._given)} of {len(self._plan.waves) + 1} waves were given; iterate and give all first")
        start = time.perf_counter()
        self._back.advance(self._given[-1])
        out = self._back.finish()
        self._out.wait_sends()
        self.waited.append(time.perf_counter() - start)
        return out


def overlapped(
    exchange: HierarchicalAllToAll,
    x_TD: Tensor,
    expert_ids_TK: Tensor,
    gates_TK: Tensor,
    *,
    experts: Experts,
    parameters: Sequence[Tensor] = (),
    on_waves: Callable[[Waves], None] | None = None,
) -> Tensor:
    """y_TD: dispatch, experts and combine with communication behind the experts, in forward and backward.

    Differentiable in x, gates and ``parameters``. Equal to dispatch, experts, combine up to rounding: the experts see a batch
    per wave. Collective, like :meth:`HierarchicalAllToAll.dispatch`.

    Args:
        experts: called once a wave. It must not communicate.
        parameters: everything in ``experts`` that is trained.
        on_waves: called with each finished :class:`Waves`, for its ``waited``.
    """
    exchange.start_tokens(x_TD, expert_ids_TK, gates_TK)
    ids_TK = expert_ids_TK.to(torch.int32)
    plan = exchange.plan(ids_TK, split=True)
    out: Tensor = _apply(exchange, plan, experts, on_waves, ids_TK, x_TD, gates_TK, *parameters)
    return out


def _apply(*args: Any) -> Any:
    return _Overlapped.apply(*args)  # type: ignore[no-untyped-call]


class _Overlapped(torch.autograd.Function):
    """Forward keeps one small graph per wave; backward runs each as its gradients arrive, in the same order."""

    @staticmethod
    def forward(
        ctx: Any,
        exchange: HierarchicalAllToAll,
        plan: HaloPlan,
        experts: Experts,
        on_waves: Callable[[Waves], None] | None,
        ids_TK: Tensor,
        x_TD: Tensor,
        gates_TK: Tensor,
        *parameters: Tensor,
    ) -> Tensor:
        wanted = any(ctx.needs_input_grad)
        waves = Waves(exchange, plan, [x_TD, gates_TK, ids_TK], "dispatch", "combine")
        graphs = []
        for wave in waves:
            rows, gates, ids = wave.fields
            with torch.set_grad_enabled(wanted):
                rows, gates = rows.requires_grad_(wanted), gates.requires_grad_(wanted)
                y = experts(rows, ids, gates)
                check_results(y, rows)
            if wanted:
                graphs.append((rows, gates, y))
            waves.give(wave, [y.detach()])
        ctx.exchange, ctx.plan, ctx.graphs, ctx.parameters, ctx.on_waves = exchange, plan, graphs, parameters, on_waves
        (out,) = waves.finish()
        if on_waves is not None:
            on_waves(waves)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TD: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.graphs is None:
            raise RuntimeError("backward through one overlapped exchange a second time; run the forward again")
        waves = Waves(ctx.exchange, ctx.plan, [dy_TD], "d_combine", "d_dispatch")
        wanted = [p for p in ctx.parameters if p.requires_grad]
        sums: list[Tensor | None] = [None] * len(wanted)
        for wave, (rows, gates, y) in zip(waves, ctx.graphs, strict=True):
            (dy,) = wave.fields
            grads = torch.autograd.grad(y, [rows, gates, *wanted], dy, allow_unused=True)
            drows, dgates = (torch.zeros_like(t) if g is None else g for t, g in zip((rows, gates), grads, strict=False))
            waves.give(wave, [drows, dgates])
            for i, g in enumerate(grads[2:]):
                if g is not None:
                    wide = g.to(torch.promote_types(g.dtype, torch.float32))  # sums over waves are not rounded to bf16
                    old = sums[i]
                    sums[i] = wide if old is None else old + wide
        ctx.graphs = None
        dx, dgates = waves.finish()
        if ctx.on_waves is not None:
            ctx.on_waves(waves)
        found = iter(None if s is None else s.to(p.dtype) for s, p in zip(sums, wanted, strict=True))
        return None, None, None, None, None, dx, dgates, *(next(found) if p.requires_grad else None for p in ctx.parameters)
