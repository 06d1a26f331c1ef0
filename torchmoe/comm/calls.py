"""The exchange for own training loops: one differentiable call per rank and layer, over the same halves the runner uses.

With one attention group, everything an attention rank does is one autograd graph and ``loss.backward()`` does the rest. F ranks
and, with several attention groups, all ranks end their work in :meth:`M2NCalls.backward`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchmoe.comm.m2n import M2NExchange
from torchmoe.comm.pending import Key, Pending
from torchmoe.comm.route import ReceivedRoute, Route, SequenceMap
from torchmoe.errors import ConfigError
from torchmoe.router import Routing

__all__ = ["M2NCalls", "Rows"]


class Rows(NamedTuple):
    """What arrived at an F rank: rows_RD and gates_RK carry gradient; ids are logical, -1 where this is no slot."""

    rows_RD: Tensor
    ids_RK: Tensor
    gates_RK: Tensor


class M2NCalls:
    """Differentiable calls over an exchange. All ranks make them in the same order of keys.

    ::

        calls = M2NCalls(exchange)
        y_TD = calls(Key(layer, mb), seqs=seqs, x_TD=x_TD, routing=routing)   # attention rank
        calls(Key(layer, mb), experts=lambda rows: y_RD)                      # F rank
        ...
        loss.backward(); calls.finish()                                       # attention rank, one attention group
        calls.backward()                                                      # F rank

    Where the next layer's attention is on another group (``placement.hands_over(layer)``: several attention groups, or the last
    layer with head='ffn') a rank of A_l calls :meth:`dispatch` (and :meth:`send_residual`), a rank of A_{l+1} calls
    :meth:`collect` (and :meth:`receive_residual`) - so does an F rank with the head, after its :meth:`combine` - and every rank
    ends with :meth:`backward`.

    Args:
        exchange: this rank's ends.
    """

    def __init__(self, exchange: M2NExchange) -> None:
        self.exchange = exchange
        self._sends: list[Pending[None]] = []
        self._roots: dict[Key, list[Tensor]] = {}
        self._received: dict[Key, ReceivedRoute] = {}

    def __call__(
        self,
        key: Key,
        *,
        seqs: SequenceMap | None = None,
        x_TD: Tensor | None = None,
        routing: Routing | None = None,
        experts: Callable[[Rows], Tensor] | None = None,
    ) -> Tensor | None:
        """The routed experts of one layer that stays on its attention group: y_TD on attention ranks, None on F ranks.

        Args:
            seqs, x_TD, routing: on attention ranks.
            experts: on F ranks, from the rows to the partial sums y_RD over this rank's experts, gates applied.

        Raises:
            ConfigError: the result belongs to another group, or arguments of the other role.
        """
        placement = self.exchange.placement
        if placement.hands_over(key.layer):
            raise ConfigError(
                f"layer {key.layer} is handed over from {placement.attention_group(key.layer)} to "
                f"{placement.attention_group(key.layer + 1)}: the result belongs to that group's ranks; use dispatch() here and "
                "collect() there, and receive() and combine() on its F ranks"
            )
        if self.exchange.where.role == "ffn":
            if experts is None:
                raise ConfigError("an F rank needs experts=, the function from received rows to their partial sums")
            self.combine(key, experts(self.receive(key)))
            return None
        if seqs is None or x_TD is None or routing is None:
            raise ConfigError("an attention rank needs seqs=, x_TD= and routing=")
        token, route = self._dispatch(key, seqs, x_TD, routing)
        return self._collect(key, route, token)

    # ---- attention ranks
    def dispatch(self, key: Key, seqs: SequenceMap, x_TD: Tensor, routing: Routing) -> None:
        """Send the rows of layer ``key.layer`` (h itself with residual='ride'), and the routing to the next group."""
        token, _ = self._dispatch(key, seqs, x_TD, routing)
        if self.exchange.placement.hands_over(key.layer):
            self._keep(self.exchange.send_ids(key, routing.expert_ids_TK, seqs))
        self._root(key, token)

    def collect(self, key: Key, seqs: SequenceMap) -> Tensor:
        """y_TD of this rank's tokens from layer ``key.layer``, dispatched by the previous attention group."""
        ids_TK = self.exchange.post_ids(key, seqs).wait()
        return self._collect(key, self.exchange.route(key.layer, ids_TK, seqs), _leaf(self.exchange))

    def send_residual(self, key: Key, seqs: SequenceMap, res_TD: Tensor) -> None:
        """Send the residual stream to the next attention group."""

        def forward(res_TD: Tensor) -> Tensor:
            self._keep(self.exchange.send_residual(key, res_TD, seqs))
            return res_TD.new_zeros(())

        self._root(key, _apply(forward, lambda _: (self.exchange.post_d_residual(key, seqs).wait(),), res_TD))

    def receive_residual(self, key: Key, seqs: SequenceMap) -> Tensor:
        """The residual stream of this rank's tokens from the previous attention group."""

        def backward(dres_TD: Tensor) -> tuple[None]:
            self._keep(self.exchange.send_d_residual(key, dres_TD, seqs))
            return (None,)

        res_TD: Tensor = _apply(lambda _: self.exchange.post_residual(key, seqs).wait(), backward, _leaf(self.exchange))
        return res_TD

    # ---- F ranks
    def receive(self, key: Key) -> Rows:
        """The rows of layer ``key.layer``, for :meth:`combine`."""
        received = self._received[key] = self.exchange.post_counts(key).wait()
        rows_RD, ids_RK, gates_RK = self.exchange.post_dispatch(key, received).wait()

        def backward(dx_RD: Tensor, dgates_RK: Tensor) -> tuple[None]:
            self._keep(self.exchange.send_d_dispatch(key, received, dx_RD, dgates_RK))
            return (None,)

        # the views of the receive buffer are handed out, not copied
        rows, gates = _apply(lambda _: (rows_RD, gates_RK), backward, _leaf(self.exchange))
        return Rows(rows, ids_RK, gates)

    def received(self, key: Key) -> ReceivedRoute:
        """Whose rows :meth:`receive` returned, until :meth:`combine`; e.g. for ``exchange.primary``."""
        return self._received[key]

    def combine(self, key: Key, y_RD: Tensor) -> None:
        """Send the partial sums of the rows of :meth:`receive` to the next attention group."""
        if key not in self._received:
            raise ConfigError(
                f"combine of layer {key.layer}, micro-batch {key.microbatch} without rows to combine; "
                "call receive() with this key first, and combine() once"
            )
        if not isinstance(y_RD, Tensor):
            raise ConfigError(
                f"the experts of layer {key.layer} returned {type(y_RD).__name__}; return partial sums, one per received row"
            )
        received = self._received.pop(key)

        def forward(y_RD: Tensor) -> Tensor:
            self._keep(self.exchange.send_combine(key, received, y_RD))
            return y_RD.new_zeros(())

        self._root(key, _apply(forward, lambda _: (self.exchange.post_d_combine(key, received).wait(),), y_RD))

    # ---- the end of a step
    def backward(self, loss: Tensor | None = None) -> None:
        """Backward of everything this rank sent, last key first, after ``loss`` if it has one; then :meth:`finish`."""
        if loss is not None:
            loss.backward()  # type: ignore[no-untyped-call]
        for key in reversed(list(self._roots)):
            # the roots of one key share a graph: one backward for all
            torch.autograd.backward([r for r in self._roots.pop(key) if r.requires_grad])
        self.finish()

    def finish(self) -> None:
        """Wait until everything that was sent has arrived."""
        for pending in self._sends:
            pending.wait()
        self._sends.clear()
        self.exchange.settle()

    # ---- inside
    def _keep(self, pending: Pending[None]) -> None:
        for p in self._sends:
            if p.done():
                p.wait()  # a finished send may still have failed
        self._sends = [p for p in self._sends if not p.done()] + [pending]

    def _root(self, key: Key, token: Tensor) -> None:
        self._roots.setdefault(key, []).append(token)

    def _dispatch(self, key: Key, seqs: SequenceMap, x_TD: Tensor, routing: Routing) -> tuple[Tensor, Route]:
        route = self.exchange.route(key.layer, routing.expert_ids_TK, seqs)

        def forward(x_TD: Tensor, gates_TK: Tensor) -> Tensor:
            self._keep(self.exchange.send_counts(key, route, seqs))
            self._keep(self.exchange.send_dispatch(key, route, x_TD, gates_TK, routing.expert_ids_TK))
            return x_TD.new_zeros(())

        def backward(_: Tensor) -> tuple[Tensor, Tensor]:
            return self.exchange.post_d_dispatch(key, route).wait()

        return _apply(forward, backward, x_TD, routing.gates_TK.to(self.exchange.gate_dtype)), route

    def _collect(self, key: Key, route: Route, token: Tensor) -> Tensor:
        def backward(dy_TD: Tensor) -> tuple[Tensor]:
            self._keep(self.exchange.send_d_combine(key, route, dy_TD))
            return (torch.zeros_like(token),)

        # the token makes autograd wait for d_dispatch only after d_combine has been sent
        y_TD: Tensor = _apply(lambda _: self.exchange.post_combine(key, route).wait(), backward, token)
        return y_TD


def _leaf(exchange: M2NExchange) -> Tensor:
    """A scalar that wants a gradient, so that what is received is part of a graph."""
    return torch.zeros((), dtype=exchange.dtype, device=exchange.device, requires_grad=True)


class _Exchange(torch.autograd.Function):
    """A function given by its forward and its backward; ids and routes are data of the closures."""

    @staticmethod
    def forward(ctx: Any, forward: Callable[..., Any], backward: Callable[..., Any], *inputs: Tensor) -> Any:
        ctx.backward_of = backward
        return forward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return (None, None, *ctx.backward_of(*grads))


def _apply(forward: Callable[..., Any], backward: Callable[..., Any], *inputs: Tensor) -> Any:
    return _Exchange.apply(forward, backward, *inputs)  # type: ignore[no-untyped-call]
