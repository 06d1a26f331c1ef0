"""What every exchange of expert parallelism has in common: the calls, and that the gradient of one direction is the other.

A subclass moves rows. ``_out`` takes this rank's token fields to the ranks that own their experts, ``_back`` takes rows the
other way and adds them up per token; ``_out`` is the gradient of ``_back`` and the other way round.
"""

from __future__ import annotations

import functools
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any, NoReturn, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from torchmoe.comm.route import Route
from torchmoe.errors import ConfigError, check_whole
from torchmoe.placement import contiguous_owners

__all__ = ["Dispatched", "TokenExchange", "check_results"]


P = ParamSpec("P")
R = TypeVar("R")


def _untraced(method: Callable[P, R]) -> Callable[P, R]:
    """Sizes of messages are known in the step only: under torch.compile the graph stops before ``method``."""

    @functools.wraps(method)
    def either(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            from torchmoe.comm.untraced import call

            return call(method, *args, **kwargs)  # type: ignore[no-any-return]
        return method(*args, **kwargs)

    return either


@dataclass(frozen=True)
class Dispatched:
    """The rows that came to this rank, by source rank, then token: one row per token that has a slot here.

    Args:
        rows_RD: token rows.
        expert_ids_RK: logical ids, int32; -1 where a slot is dropped or belongs to another rank.
        gates_RK: gates of the slots.
        plan: what :meth:`TokenExchange.combine` needs; opaque.
    """

    rows_RD: Tensor
    expert_ids_RK: Tensor
    gates_RK: Tensor
    plan: Any


class TokenExchange(ABC):
    """Expert parallelism over W ranks. Every call is collective: all ranks make it, in one order, also without tokens.

    Args:
        index: this rank's index in the exchange.
        num_ranks: W.
        num_experts: E of the layer; None where only :meth:`all_to_all` is used.
        owners: expert -> index of the rank that holds it; default: contiguous blocks, sizes equal up to one.
    """

    def __init__(self, index: int, num_ranks: int, num_experts: int | None, owners: Sequence[int] | None) -> None:
        if num_experts is not None:
            check_whole("num_experts", num_experts, 1, "give the experts of all ranks")
        if num_experts is None and owners is not None:
            raise ConfigError(f"owners={list(owners)} were given without num_experts; give both")
        self.index, self.num_ranks, self.num_experts = index, num_ranks, num_experts
        self.form = ""
        """What the rows of the call in progress are like; compared with the counts."""
        self.owners: tuple[int, ...] = ()
        if num_experts is not None:
            self.own(contiguous_owners(num_experts, num_ranks) if owners is None else owners)

    def __deepcopy__(self, memo: dict[int, Any]) -> TokenExchange:
        # A copy of a layer (an average of its weights, say) sends over the connections that exist.
        return self

    def __reduce__(self) -> NoReturn:
        raise ConfigError(
            f"{type(self).__name__} holds connections to other ranks and cannot be pickled; save the module's state_dict()"
        )

    def own(self, owners: Sequence[int]) -> None:
        """Set who holds which expert (after a migration); the same on all ranks, between two layers' calls."""
        owners = tuple(owners)
        if len(owners) != self.num_experts or any(not 0 <= o < self.num_ranks for o in owners):
            raise ConfigError(
                f"owners={list(owners)} must name one of {self.num_ranks} ranks for each of {self.num_experts} experts"
            )
        self.owners = owners
        # Tables are data on the host, also where the model around them is built under torch.device("meta").
        self._owners_E = torch.tensor(owners, dtype=torch.long, device="cpu")
        table = [-1] * (len(owners) + 1)  # id -1 reads the last entry
        for place, expert in enumerate(self.local_experts):
            table[expert] = place
        self._local_E = torch.tensor(table, dtype=torch.int32, device="cpu")

    @property
    def local_experts(self) -> tuple[int, ...]:
        """Logical ids, ascending, of the experts on this rank."""
        return tuple(e for e, o in enumerate(self.owners) if o == self.index)

    def local_ids(self, expert_ids_RK: Tensor) -> Tensor:
        """Place of each slot's expert in :attr:`local_experts`, int32; -1 for slots without one here."""
        self._local_E = self._local_E.to(expert_ids_RK.device)
        return self._local_E[expert_ids_RK.long()]

    # ---- tokens
    @_untraced
    def dispatch(self, x_TD: Tensor, expert_ids_TK: Tensor, gates_TK: Tensor) -> Dispatched:
        """Send every token to the ranks that own one of its experts (differentiable in x and gates).

        Args:
            x_TD: T tokens, T may differ between ranks and be 0.
            expert_ids_TK: logical ids, -1 for a dropped slot.
            gates_TK: gates. The dtypes of x and gates, D and K are the same on all ranks.

        Raises:
            RoutingError: ids out of range.
            ExchangeError: a message was late, lost or not the one expected.
        """
        self.start_tokens(x_TD, expert_ids_TK, gates_TK)
        plan = self._plan(expert_ids_TK)
        rows_RD, gates_RK, ids_RK = _apply(_Out, self, plan, "dispatch", x_TD, gates_TK, expert_ids_TK.to(torch.int32))
        return Dispatched(rows_RD, ids_RK, gates_RK, plan)

    def start_tokens(self, x_TD: Tensor, expert_ids_TK: Tensor, gates_TK: Tensor) -> None:
        """Refuse what :meth:`dispatch` cannot send, and remember what its rows are like."""
        if self.num_experts is None:
            raise ConfigError("this exchange was built without num_experts, so it cannot route tokens; give num_experts")
        if x_TD.ndim != 2 or gates_TK.ndim != 2 or expert_ids_TK.shape != gates_TK.shape or len(gates_TK) != len(x_TD):
            raise ConfigError(
                f"x {tuple(x_TD.shape)}, expert ids {tuple(expert_ids_TK.shape)} and gates {tuple(gates_TK.shape)} "
                "must be [T, D], [T, K] and [T, K] of one T"
            )
        floats = x_TD.is_floating_point() and gates_TK.is_floating_point()
        if not floats or expert_ids_TK.is_floating_point() or expert_ids_TK.dtype == torch.bool:
            raise ConfigError(
                f"x {x_TD.dtype} and gates {gates_TK.dtype} must be floating point, expert ids {expert_ids_TK.dtype} integers; "
                "cast them"
            )
        if not x_TD.device == expert_ids_TK.device == gates_TK.device:
            raise ConfigError(
                f"x is on {x_TD.device}, expert ids on {expert_ids_TK.device} and gates on {gates_TK.device}; use one device"
            )
        self.form = (
            f"tokens of {x_TD.shape[1]} {x_TD.dtype} with {gates_TK.shape[1]} {gates_TK.dtype} gates and "
            f"owners {zlib.crc32(repr(self.owners).encode()):x}"
        )

    @_untraced
    def combine(self, y_RD: Tensor, dispatched: Dispatched) -> Tensor:
        """Return the rows of :meth:`dispatch`, one result each, and sum them per token: y_TD (differentiable).

        Sums are taken in fp32 or wider in rank order and returned in the dtype of ``y_RD``; two runs are bit-equal.
        """
        check_results(y_RD, dispatched.rows_RD)
        return _apply(_Back, self, dispatched.plan, "combine", y_RD)  # type: ignore[no-any-return]

    # ---- rows
    @_untraced
    def all_to_all(self, rows_SD: Tensor, send_rows: Sequence[int], recv_rows: Sequence[int] | None = None) -> Tensor:
        """The plain exchange (differentiable): rows sorted by destination in, rows sorted by source out.

        Args:
            rows_SD: [S, D]; the first ``send_rows[0]`` rows go to rank 0, and so on.
            send_rows: rows for each of the W ranks.
            recv_rows: rows from each rank, where the caller knows them; otherwise the counts are exchanged first. They must be
                right: the flat exchange then compares nothing beforehand, and gloo ends a process that is sent too much.
        """
        try:
            send_rows = [index(n) for n in send_rows]
            recv_rows = None if recv_rows is None else [index(n) for n in recv_rows]
        except TypeError:
            raise ConfigError(f"send_rows={send_rows} and recv_rows={recv_rows} must be integers; count rows") from None
        if len(send_rows) != self.num_ranks or sum(send_rows) != rows_SD.shape[0] or min(send_rows) < 0 or rows_SD.ndim != 2:
            raise ConfigError(
                f"send_rows={list(send_rows)} must cut the rows of {tuple(rows_SD.shape)} into {self.num_ranks} parts"
            )
        self.form = f"rows of {rows_SD.shape[1]} {rows_SD.dtype}"
        plan = self._plan_rows(tuple(send_rows), None if recv_rows is None else tuple(recv_rows))
        (out,) = _apply(_Out, self, plan, "rows", rows_SD)
        return out  # type: ignore[no-any-return]

    # ---- what a subclass does
    @abstractmethod
    def _plan(self, expert_ids_TK: Tensor) -> Any:
        """The way of these tokens; counts are exchanged."""

    @abstractmethod
    def _plan_rows(self, send_rows: tuple[int, ...], recv_rows: tuple[int, ...] | None) -> Any:
        """The way of rows that are already sorted by destination."""

    @abstractmethod
    def _out(self, plan: Any, kind: str, fields: Sequence[Tensor]) -> list[Tensor]:
        """Token fields -> the fields of the rows received. Integer fields are expert ids, masked by owner on the way."""

    @abstractmethod
    def _back(self, plan: Any, kind: str, fields: Sequence[Tensor]) -> list[Tensor]:
        """Rows -> tokens: field 0 is summed, field 1 (if any) taken slot by slot from the slot's owner."""

    def _device_owners(self, device: torch.device) -> Tensor:
        self._owners_E = self._owners_E.to(device)
        return self._owners_E


def check_results(y_RD: Tensor, rows_RD: Tensor) -> None:
    """Refuse results that the other ranks do not expect: the sizes of messages follow from the rows that came."""
    if not isinstance(y_RD, Tensor) or y_RD.shape != rows_RD.shape or y_RD.dtype != rows_RD.dtype:
        got = f"{tuple(y_RD.shape)} {y_RD.dtype}" if isinstance(y_RD, Tensor) else type(y_RD).__name__
        raise ConfigError(
            f"results {got} do not fit the rows {tuple(rows_RD.shape)} {rows_RD.dtype} that came; "
            "return one row per received row, of its width and dtype"
        )


def _apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    return function.apply(*args)  # type: ignore[no-untyped-call]


class _Out(torch.autograd.Function):
    """Forward ``_out``, backward ``_back`` over ALL floating fields: message sizes never depend on who needs a gradient."""

    @staticmethod
    def forward(ctx: Any, exchange: TokenExchange, plan: Any, kind: str, *fields: Tensor) -> tuple[Tensor, ...]:
        ctx.exchange, ctx.plan, ctx.kind = exchange, plan, "d_" + kind
        ctx.floating = [f.is_floating_point() for f in fields]
        out = exchange._out(plan, kind, fields)
        ctx.mark_non_differentiable(*(t for t in out if not t.is_floating_point()))
        return tuple(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        wanted = [g for g, floating in zip(grads, ctx.floating, strict=True) if floating]
        back = iter(ctx.exchange._back(ctx.plan, ctx.kind, wanted))
        return None, None, None, *(next(back) if floating else None for floating in ctx.floating)


class _Back(torch.autograd.Function):
    """Forward ``_back``, backward ``_out``."""

    @staticmethod
    def forward(ctx: Any, exchange: TokenExchange, plan: Any, kind: str, rows: Tensor) -> Tensor:
        ctx.exchange, ctx.plan, ctx.kind = exchange, plan, "d_" + kind
        return exchange._back(plan, kind, [rows])[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, ctx.exchange._out(ctx.plan, ctx.kind, [grad])[0]


def spread(route: Route, n: int, fields: Sequence[Tensor]) -> list[Tensor]:
    """The rows of token fields that go to target ``n`` of ``route``; integer fields are ids, kept where the target owns them."""
    at = slice(route.offsets[n], route.offsets[n + 1])
    token_R, owned_RK = route.token_indices_R[at], route.owned_RK[at]
    return [f[token_R] if f.is_floating_point() else torch.where(owned_RK, f[token_R], -1) for f in fields]


def gather(route: Route, parts: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Inverse direction of :func:`spread`, from one list of fields per target: field 0 is summed, field 1 taken per slot."""
    first = parts[0]
    out = [route.sum_rows([p[0] for p in parts]).to(first[0].dtype)]
    return out if len(first) == 1 else [*out, route.take_slots([p[1] for p in parts])]
