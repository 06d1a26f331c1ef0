"""check_dispatcher passes a right dispatcher and names what is wrong with a wrong one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
from torch import Tensor

from torchmoe import AllToAllExchange
from torchmoe.placement import contiguous_owners
from torchmoe.testing import RankContext, RanksFailed, check_dispatcher


class Flat:
    """The library's flat exchange."""

    def __init__(self, ctx: RankContext) -> None:
        ranks = range(ctx.world)
        self.exchange = AllToAllExchange(ctx.transport(AllToAllExchange.communicators(ranks)), num_experts=7)

    def dispatch(self, x: Tensor, ids: Tensor) -> tuple[Tensor, Any]:
        here = self.exchange.dispatch(x, ids, torch.ones(ids.shape, dtype=x.dtype))
        return here.rows_RD, here

    def combine(self, rows: Tensor, state: Any) -> Tensor:
        return self.exchange.combine(rows, state)


class Slots:
    """A user's: one row per slot over torch's own all-to-all. ``wrong`` breaks one property."""

    def __init__(self, ctx: RankContext, wrong: str = "") -> None:
        self.world, self.wrong = ctx.world, wrong
        self.owners = torch.tensor(contiguous_owners(7, ctx.world))

    def dispatch(self, x: Tensor, ids: Tensor) -> tuple[Tensor, Any]:
        token, k = (ids >= 0).nonzero(as_tuple=True)
        owner = self.owners[ids[token, k]]
        order = owner.argsort(stable=True)
        if self.wrong == "order":
            order = order.flip(0)[owner[order.flip(0)].argsort(stable=True)]
        if self.wrong == "conservation":
            order = order[1:]
        token, send = token[order], torch.bincount(owner[order], minlength=self.world)
        recv = torch.empty_like(send)
        dist.all_to_all_single(recv, send)
        ins, outs = send.tolist(), recv.tolist()
        rows = x[token] + (1.0 if self.wrong == "linearity" else 0.0)
        if self.wrong == "duality":
            rows = rows.detach() + 0 * rows
        return fc.all_to_all_single_autograd(rows, outs, ins, dist.group.WORLD), (token, ins, outs, len(x))

    def combine(self, rows: Tensor, state: Any) -> Tensor:
        token, ins, outs, n = state
        back = fc.all_to_all_single_autograd(rows, ins, outs, dist.group.WORLD)
        return torch.zeros(n, rows.shape[1], dtype=rows.dtype).index_add(0, token, back)


def test_the_flat_exchange_has_all_properties() -> None:
    check_dispatcher(Flat, world=4, num_experts=7, top_k=3)


def test_a_dispatcher_over_torch_distributed_has_all_properties() -> None:
    check_dispatcher(Slots, world=3, num_experts=7, top_k=2, copies="slot")


@pytest.mark.parametrize("wrong", ["order", "conservation", "linearity", "duality"])
def test_a_wrong_dispatcher_is_told_what_is_wrong(wrong: str) -> None:
    words = {"conservation": "conservation|inverse", "linearity": "inverse|linearity|duplication"}.get(wrong, wrong)
    with pytest.raises((AssertionError, RanksFailed), match=words):
        check_dispatcher(lambda ctx: Slots(ctx, wrong), world=3, num_experts=7, top_k=2, copies="slot")
