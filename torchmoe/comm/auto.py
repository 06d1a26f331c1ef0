"""AutoAllToAll: the flat or the hierarchical exchange, call by call, whichever the measured links make faster."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from torchmoe.comm.all_to_all import COUNTS, ROWS, AllToAllExchange, FlatPlan
from torchmoe.comm.halo import NAMES, HaloPlan, HierarchicalAllToAll
from torchmoe.comm.links import Hop, LinkModel, Sizes, fit_hop
from torchmoe.comm.route import Route
from torchmoe.comm.rows import RowWire, fields_of
from torchmoe.comm.transport import Transport
from torchmoe.errors import ExchangeError
from torchmoe.placement import Communicator, Deadlines

__all__ = ["AutoAllToAll"]

Form = Literal["flat", "halo"]
PROBES = (1024, 1 << 18)  # bytes per rank
ROUNDS = 5
NANO = 1_000_000_000
MARGIN = 0.95  # what two hops must gain over one by the model, which is not exact


@dataclass
class AutoPlan:
    """Both ways of one call's rows, and what all ranks know of its size. ``form`` is chosen when the rows' width is known."""

    flat: FlatPlan
    halo: HaloPlan
    sizes: Sizes
    form: Form | None = None


class AutoAllToAll(HierarchicalAllToAll):
    """An exchange that takes the flat form where messages are cheap and HALO where they are not; same calls, same rows.

    With the counts every rank learns the largest number of rows that any rank sends over either kind of link, in either form.
    From these, the width of a row and the model of the links all ranks compute the same two times, so they choose alike. The form
    of the counts themselves is fixed, since their size is.

    Args:
        links: what messages cost, the same on all ranks; None measures them now (collective, some 20 small exchanges).
        The others: see :class:`HierarchicalAllToAll`.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        lanes: int,
        links: LinkModel | None = None,
        ranks: Sequence[int] | None = None,
        domains: Sequence[Sequence[int]] = (),
        num_experts: int | None = None,
        owners: Sequence[int] | None = None,
        deadlines: Deadlines | None = None,
        collective: bool = True,
    ) -> None:
        super().__init__(
            transport,
            lanes=lanes,
            ranks=ranks,
            domains=domains,
            num_experts=num_experts,
            owners=owners,
            deadlines=deadlines,
            collective=collective,
        )
        self._flat = AllToAllExchange(transport, ranks=ranks, deadlines=deadlines, collective=collective)
        self.links = self._measure() if links is None else links
        t, words = self.topology, len(Sizes._fields) + 2 + lanes
        counts = Sizes((t.nodes - 1) * lanes * words, (lanes - 1) * words, (t.nodes - 1) * words, (lanes - 1) * t.nodes * words)
        self.counts_form: Form = self._faster(counts, 8)
        self.chosen: dict[Form, int] = {"flat": 0, "halo": 0}
        """How often each form was taken."""

    @staticmethod
    def communicators(ranks: Sequence[int], lanes: int) -> tuple[Communicator, ...]:
        return *AllToAllExchange.communicators(ranks), *HierarchicalAllToAll.communicators(ranks, lanes)

    def __repr__(self) -> str:
        return f"AutoAllToAll({super().__repr__()}, {self.links}, chosen={self.chosen})"

    def _faster(self, sizes: Sizes, row_bytes: float) -> Form:
        t = self.topology
        halo, flat = self.links.halo(t, sizes, row_bytes), self.links.flat(t, sizes, row_bytes)
        return "halo" if halo < MARGIN * flat else "flat"

    # ---- the way
    def _plan(self, expert_ids_TK: Tensor) -> AutoPlan:  # type: ignore[override]
        t, device = self.topology, expert_ids_TK.device
        self._nodes_E = self._nodes_E.to(device)
        self._lanes_E = self._lanes_E.to(device)
        nodes = Route.build(expert_ids_TK, self._nodes_E, t.nodes)
        ranks = Route.build(expert_ids_TK, self._device_owners(device), t.nodes * t.lanes)
        return self._both(nodes.rows, ranks.rows, nodes, ranks)

    def _plan_rows(self, send_rows: tuple[int, ...], recv_rows: tuple[int, ...] | None) -> AutoPlan:  # type: ignore[override]
        t = self.topology
        out = tuple(sum(send_rows[n * t.lanes : (n + 1) * t.lanes]) for n in range(t.nodes))
        plan = self._both(out, send_rows, None, None)
        if recv_rows is not None and recv_rows != plan.flat.recv_rows:
            raise ExchangeError(
                f"recv_rows={list(recv_rows)} and the other ranks send {list(plan.flat.recv_rows)}; pass what they send, or None"
            )
        return plan

    def _both(self, out: tuple[int, ...], rows: tuple[int, ...], nodes: Route | None, ranks: Route | None) -> AutoPlan:
        t = self.topology
        mine = Sizes.of(rows, out, self.node, self.lane, t.lanes)
        if self.counts_form == "halo":
            halo, largest = self._exchange_counts(out, rows, False, nodes, mine)
        else:
            halo, largest = self._flat_counts(out, rows, nodes, mine)
        recv = tuple(halo.final[k][m] for m in range(t.nodes) for k in range(t.lanes))
        return AutoPlan(FlatPlan(rows, recv, ranks), halo, Sizes(*largest))

    def _flat_counts(
        self, out: tuple[int, ...], rows: Sequence[int], route: Route | None, shared: Sequence[int]
    ) -> tuple[HaloPlan, list[int]]:
        """What the two hops of counts tell, in one: every rank hears of its rows, lane neighbours also of their node's."""
        t, s = self.topology, len(shared)
        values = {}
        for i, rank in enumerate(self.ranks):
            n = i // t.lanes
            values[rank] = [*shared, rows[i], out[n], *rows[n * t.lanes : (n + 1) * t.lanes]]
        me = self.ranks[self.index]
        own = values.pop(me)
        got = self._flat._wire.counts(COUNTS, values, s + 2 + t.lanes, self.form) if values else {}
        got[me] = own
        along = [got[self.ranks[m * t.lanes + self.lane]] for m in range(t.nodes)]
        final = [[got[self.ranks[m * t.lanes + k]][s] for m in range(t.nodes)] for k in range(t.lanes)]
        plan = HaloPlan(
            out, tuple(v[s + 1] for v in along), [v[s + 2 :] for v in along], final, t.waves(self.node, split=False), route
        )
        return plan, [max(v[i] for v in got.values()) for i in range(s)]

    # ---- whole exchanges
    def _out(self, plan: AutoPlan, kind: str, fields: Sequence[Tensor]) -> list[Tensor]:  # type: ignore[override]
        if plan.form is None:
            plan.form = self._faster(plan.sizes, sum(f.shape[1] * f.dtype.itemsize for f in fields))
            self.chosen[plan.form] += 1
        return self._flat._out(plan.flat, kind, fields) if plan.form == "flat" else super()._out(plan.halo, kind, fields)

    def _back(self, plan: AutoPlan, kind: str, fields: Sequence[Tensor]) -> list[Tensor]:  # type: ignore[override]
        # the first use of a plan goes out and has chosen
        return self._flat._back(plan.flat, kind, fields) if plan.form == "flat" else super()._back(plan.halo, kind, fields)

    # ---- the links
    def _measure(self) -> LinkModel:
        """Time one hop of either kind on all ranks at once; the slowest rank's times are everybody's."""
        t = self.topology
        away = [r for i, r in enumerate(self.ranks) if i // t.lanes != self.node]
        device = getattr(self._wire.transport, "device", torch.device("cpu"))
        probes: list[tuple[str, int, int, Callable[[], object]]] = []
        for size in PROBES:
            for hop, wire, name, peers in (
                ("between", self._wire, NAMES["lane", "out"], list(self.peers["lane"].values())),
                ("between", self._flat._wire, ROWS, away),
                ("inside", self._wire, NAMES["node", "out"], list(self.peers["node"].values())),
            ):
                if peers:
                    rows = torch.zeros(max(1, size // len(peers) // 64), 16, device=device)
                    num_bytes = rows.numel() * 4 * len(peers)
                    probes.append((hop, len(peers), num_bytes, _probe(wire, name, peers, rows)))
        mine = []
        for *_, exchange in probes:
            times = []
            for _ in range(ROUNDS):  # in a row: the first opens connections and waits for ranks that are late from before
                start = time.perf_counter()
                exchange()
                times.append(round((time.perf_counter() - start) * NANO))
            mine.append(sorted(times[1:])[(ROUNDS - 1) // 2])
        others = [r for r in self.ranks if r != self.ranks[self.index]]
        shared = self._flat._wire.counts(COUNTS, dict.fromkeys(others, mine), len(mine), "times of the links")
        slowest = [max([mine[i], *(v[i] for v in shared.values())]) / NANO for i in range(len(mine))]
        hops = {}
        for hop in ("between", "inside"):
            points = [(n, size, s) for (h, n, size, _), s in zip(probes, slowest, strict=True) if h == hop]
            hops[hop] = fit_hop(points) if points else Hop(0.0, float("inf"))
        return LinkModel(**hops)


def _probe(wire: RowWire, name: str, peers: Sequence[int], rows: Tensor) -> Callable[[], object]:
    """One message to and from each of ``peers``."""
    receives = dict.fromkeys(peers, rows.shape[0])
    return lambda: wire.post(name, "rows", {p: [rows] for p in peers}, receives, fields_of([rows]), device=rows.device).wait()
