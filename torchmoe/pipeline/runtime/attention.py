"""An attention rank's units: embedding, attention stages, head; what it keeps of them, and their messages."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from torchmoe.comm.m2n import Key, M2NExchange, Pending
from torchmoe.comm.route import Route
from torchmoe.errors import ConfigError
from torchmoe.pipeline.action import Action, Op
from torchmoe.pipeline.runtime.role import Batch, key_of, run_hook, unknown_edge, unknown_op
from torchmoe.pipeline.runtime.stage import Stages

__all__ = ["AttentionRole"]


@dataclass
class _Dispatched:
    """Attention unit of layer l: lives from its forward to its backward."""

    outputs: tuple[Tensor, ...]
    """(res_TD, x_TD, gates_TK[, aux]): what one backward starts from; without x_TD if rows carry h (residual='ride')."""
    input_TD: Tensor | None
    """Leaf at the unit's entry; None for layer 0, whose backward runs into the embedding."""
    expert_ids_TK: Tensor
    route: Route
    dx_TD: Tensor | None = None
    dgates_TK: Tensor | None = None
    dres_TD: Tensor | None = None


@dataclass
class _Combined:
    """The return of layer l to the unit above: lives until the gradients of its messages have been sent."""

    route: Route
    y_TD: Tensor | None = None
    res_TD: Tensor | None = None
    dy_TD: Tensor | None = None
    unsent: int = 0


class AttentionRole:
    """Runs F and B of attention units and of the head."""

    def __init__(self, stages: Stages, exchange: M2NExchange) -> None:
        self._stages, self._exchange = stages, exchange
        self._num_layers = exchange.placement.num_layers
        self._hands_over = [exchange.placement.hands_over(layer) for layer in range(self._num_layers)]
        """Per layer: the unit above it is on another group."""
        self._ride = exchange.residual == "ride"
        self._batch = Batch([], [], train=True)
        self._dispatched: dict[Key, _Dispatched] = {}
        self._combined: dict[Key, _Combined] = {}
        self._head: dict[Key, tuple[Tensor, Tensor]] = {}
        self._labels: dict[Key, Tensor] = {}

    def key(self, action: Action) -> Key:
        return key_of(action)

    def shard(self, action: Action) -> None:
        run_hook(self._stages, action)

    def begin(self, batch: Batch) -> None:
        self._batch = batch
        self._dispatched.clear()
        self._combined.clear()
        self._head.clear()
        self._labels.clear()

    def left(self) -> list[Key]:
        return [*self._dispatched, *self._combined, *self._head, *self._labels]

    # ---- compute
    def compute(self, action: Action, key: Key) -> None:
        if action.op is Op.FORWARD:
            self._forward(key)
        elif action.op is Op.BACKWARD:
            self._backward(key)
        else:
            raise unknown_op(action, (Op.FORWARD, Op.BACKWARD))

    def _forward(self, key: Key) -> None:
        mb, batch = self._batch.mbs[key.microbatch], self._batch
        leaf = self._enter(key) if key.layer > 0 else None
        if leaf is None:
            assert self._stages.embedding is not None
            h_TD = self._stages.embedding(mb)
        else:
            h_TD = leaf
        if key.layer == self._num_layers:
            assert self._stages.head is not None and leaf is not None
            labels = self._labels.pop(Key(key.layer - 1, key.microbatch), None)
            loss = self._stages.head(h_TD, mb if labels is None else replace(mb, target=labels))
            if loss.ndim:
                raise ConfigError(f"the head returned {tuple(loss.shape)}; return one scalar, the sum of this rank's losses")
            batch.losses.append(loss.detach())
            if batch.train:
                self._head[key] = loss, leaf
            return
        res_TD, x_TD, routing = self._stages.attention[key.layer](h_TD, mb)
        if x_TD.ndim != 2 or res_TD.shape != x_TD.shape:  # a residual that broadcasts would pass
            raise ConfigError(
                f"attention[{key.layer}] returned res {tuple(res_TD.shape)} and x {tuple(x_TD.shape)}; both are [T, D]"
            )
        route = self._exchange.route(key.layer, routing.expert_ids_TK, batch.seqs[key.microbatch])
        # riding rows carry h: the experts' input and the residual are one tensor with one gradient
        carried = [res_TD] if self._ride else [res_TD, x_TD]
        outputs = [*carried, routing.gates_TK.to(self._exchange.gate_dtype)]
        if routing.aux is not None:
            outputs.append(routing.aux)
            aux = routing.aux.detach()
            batch.aux_loss = aux if batch.aux_loss is None else batch.aux_loss + aux
        self._dispatched[key] = _Dispatched(tuple(outputs), leaf, routing.expert_ids_TK, route)
        if not self._hands_over[key.layer]:
            self._combined[key] = _Combined(route)

    def _enter(self, key: Key) -> Tensor:
        """What the experts of the layer below returned plus the residual, as a leaf."""
        below = Key(key.layer - 1, key.microbatch)
        returned = self._combined[below]
        assert returned.y_TD is not None
        if self._ride:
            h_TD = returned.y_TD
        else:
            over = self._hands_over[below.layer]
            residual = returned.res_TD if over else self._dispatched[below].outputs[0].detach()
            assert residual is not None
            h_TD = returned.y_TD + residual
        returned.y_TD = returned.res_TD = None
        if self._batch.train:
            return h_TD.requires_grad_()
        del self._combined[below]
        if not self._hands_over[below.layer]:
            del self._dispatched[below]
        return h_TD

    def _backward(self, key: Key) -> None:
        if key.layer == self._num_layers:
            loss, leaf = self._head.pop(key)
            loss.backward()  # type: ignore[no-untyped-call]
            self._leave(key, leaf)
            return
        d = self._dispatched.pop(key)
        grads: list[Tensor | None] = [*([] if self._ride else [d.dres_TD]), d.dx_TD, d.dgates_TK]
        if len(d.outputs) > len(grads):
            grads.append(torch.ones_like(d.outputs[-1]))
        live = [(o, g) for o, g in zip(d.outputs, grads, strict=True) if o.requires_grad]
        # ONE backward for the residual, the experts' input, the gates and the balancing loss: two would visit the shared
        # graph twice
        torch.autograd.backward([o for o, _ in live], [g for _, g in live])
        if d.input_TD is not None:
            self._leave(key, d.input_TD)

    def _leave(self, key: Key, leaf: Tensor) -> None:
        """The gradient of the unit's input is both the combine's and the residual's."""
        below = Key(key.layer - 1, key.microbatch)
        grad = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        returned = self._combined[below]
        returned.dy_TD = grad
        over = self._hands_over[below.layer]
        returned.unsent = 2 if over and not self._ride else 1
        if not over and not self._ride:
            self._dispatched[below].dres_TD = grad

    # ---- messages
    def send(self, edge: str, key: Key) -> Pending[None]:
        ex, seqs = self._exchange, self._batch.seqs[key.microbatch]
        if edge in ("d_combine", "d_residual"):
            r = self._combined[key]
            assert r.dy_TD is not None
            pending = ex.send_d_combine(key, r.route, r.dy_TD) if edge == "d_combine" else ex.send_d_residual(key, r.dy_TD, seqs)
            r.unsent -= 1
            if not r.unsent:
                del self._combined[key]
            return pending
        if edge == "labels":
            return ex.send_labels(key, self._batch.mbs[key.microbatch].target, seqs)
        d = self._dispatched[key]
        if edge == "counts":
            return ex.send_counts(key, d.route, seqs)
        if edge == "dispatch":
            x_TD, gates_TK = d.outputs[0 if self._ride else 1], d.outputs[1 if self._ride else 2]
            if self._ride and self._hands_over[key.layer] and not self._batch.train:
                del self._dispatched[key]
            return ex.send_dispatch(key, d.route, x_TD, gates_TK, d.expert_ids_TK)
        if edge == "ids":
            return ex.send_ids(key, d.expert_ids_TK, seqs)
        if edge == "residual":
            if not self._batch.train:
                del self._dispatched[key]
            return ex.send_residual(key, d.outputs[0], seqs)
        raise unknown_edge("attention", edge, key, "send")

    def post(self, edge: str, key: Key) -> Pending[Any]:
        ex, seqs = self._exchange, self._batch.seqs[key.microbatch]
        if edge == "combine":
            return ex.post_combine(key, self._combined[key].route)
        if edge == "d_dispatch":
            return ex.post_d_dispatch(key, self._dispatched[key].route)
        if edge == "ids":
            return ex.post_ids(key, seqs)
        if edge == "labels":
            return ex.post_labels(key, seqs)
        if edge == "residual":
            return ex.post_residual(key, seqs)
        if edge == "d_residual":
            return ex.post_d_residual(key, seqs)
        raise unknown_edge("attention", edge, key, "receive")

    def receive(self, edge: str, key: Key, value: Any) -> None:
        if edge == "combine":
            self._combined[key].y_TD = value
        elif edge == "residual":
            self._combined[key].res_TD = value
        elif edge == "ids":
            self._combined[key] = _Combined(self._exchange.route(key.layer, value, self._batch.seqs[key.microbatch]))
        elif edge == "d_dispatch":
            d = self._dispatched[key]
            d.dx_TD, d.dgates_TK = value
        elif edge == "d_residual":
            self._dispatched[key].dres_TD = value
        elif edge == "labels":
            self._labels[key] = value[:, 0]
        else:
            raise unknown_edge("attention", edge, key, "receive")
