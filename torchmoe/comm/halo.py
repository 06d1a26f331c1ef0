"""HierarchicalAllToAll: the exchange in two hops, between nodes and inside them (Piper's HALO), node-deduplicating.

Rank (m, l) = lane l of node m. Rows for node n go in one packed message to (n, l) - lane to lane, so every lane uses its own
network card - and from there to their lane inside n. Rows for the own node go directly, at the same time. A rank sends at most
(nodes - 1) messages between nodes instead of (nodes - 1) * lanes, each up to ``lanes`` times larger.

Tokens cross once per (token, node) and are expanded inside the node to one row per (token, rank); on the way back each node
sums its partial results per token before they cross. Received rows are in the flat exchange's order, bit for bit; sums differ
from it by rounding because they are grouped by node.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torchmoe.comm.all_to_all import cut, index_of, join
from torchmoe.comm.pending import Pending
from torchmoe.comm.route import Route
from torchmoe.comm.rows import Field, RowWire, fields_of
from torchmoe.comm.token_exchange import TokenExchange, gather, spread
from torchmoe.comm.topology import Topology, Wave
from torchmoe.comm.transport import Transport
from torchmoe.errors import ConfigError, ExchangeError
from torchmoe.placement import Communicator, Deadlines

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["HaloPlan", "HierarchicalAllToAll"]

Arriving = Pending[dict[int, list[Tensor]]]
# (axis, purpose). One communicator per direction of flow: returns of early waves overtake later outgoing waves.
NAMES = {(axis, what): f"halo.{axis}.{what}" for axis in ("lane", "node") for what in ("counts", "out", "back")}


@dataclass
class HaloPlan:
    """The way of one call's rows through this rank.

    Args:
        out: rows to each node.
        arrivals: rows from (node, own lane), the own node's rows among them.
        forward: node -> rows of its arrival for each lane of this node.
        final: lane -> rows that come through it, by source node.
        waves: between nodes.
        route: of the tokens over the nodes; None for rows that came sorted by destination.
        expand: node -> the route of its arrival over the lanes; filled by the first exchange, which carries the ids.
    """

    out: tuple[int, ...]
    arrivals: tuple[int, ...]
    forward: list[list[int]]
    final: list[list[int]]
    waves: tuple[Wave, ...]
    route: Route | None
    expand: dict[int, Route] = field(default_factory=dict)


class HierarchicalAllToAll(TokenExchange):
    """Exchange over nodes of ``lanes`` consecutive ranks each. Same calls and results as :class:`AllToAllExchange`.

    Args:
        transport: holds :meth:`communicators` of these ranks.
        lanes: ranks of a node.
        ranks: global ranks, node by node; default: all.
        domains: see :class:`Topology`; messages to near nodes go first.
        num_experts, owners: see :class:`TokenExchange`; ``owners`` counts in ``ranks``.
        deadlines: how long one exchange may take.
        collective: one all-to-all of the process group per hop where the transport has it (fewer switches of threads on
            gloo); False for single messages, which name the peer when something goes wrong.

    Raises:
        ConfigError: lanes that do not divide the ranks, or a rank outside them.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        lanes: int,
        ranks: Sequence[int] | None = None,
        domains: Sequence[Sequence[int]] = (),
        num_experts: int | None = None,
        owners: Sequence[int] | None = None,
        deadlines: Deadlines | None = None,
        collective: bool = True,
    ) -> None:
        self.ranks = tuple(range(transport.world_size) if ranks is None else ranks)
        self.topology = Topology.of(len(self.ranks), lanes, domains)
        super().__init__(index_of(transport.rank, self.ranks), len(self.ranks), num_experts, owners)
        self.node, self.lane = divmod(self.index, lanes)
        self.peers = {  # axis -> index on the axis -> global rank
            "lane": {n: self.ranks[n * lanes + self.lane] for n in range(self.topology.nodes) if n != self.node},
            "node": {k: self.ranks[self.node * lanes + k] for k in range(lanes) if k != self.lane},
        }
        self._wire = RowWire(transport, (deadlines or Deadlines()).exchange, collective=collective)

    @staticmethod
    def communicators(ranks: Sequence[int], lanes: int) -> tuple[Communicator, ...]:
        """What the transport must hold for an exchange over ``ranks``: all nodes' and all lanes' groups, in one order."""
        topology = Topology.of(len(ranks), lanes)
        groups = {
            "lane": [tuple(ranks[k::lanes]) for k in range(lanes)] if topology.nodes > 1 else [],
            "node": [tuple(ranks[n * lanes : (n + 1) * lanes]) for n in range(topology.nodes)] if lanes > 1 else [],
        }
        return tuple(
            Communicator(name, members, what == "counts") for (axis, what), name in NAMES.items() for members in groups[axis]
        )

    @classmethod
    def from_mesh(
        cls,
        mesh: DeviceMesh,
        *,
        domains: Sequence[Sequence[int]] = (),
        num_experts: int | None = None,
        owners: Sequence[int] | None = None,
        deadlines: Deadlines | None = None,
    ) -> HierarchicalAllToAll:
        """An exchange over a 2-D DeviceMesh of (nodes, lanes), partly on its process groups. Collective over its ranks."""
        from torchmoe.comm.mesh import mesh_transport

        if mesh.ndim != 2:
            raise ConfigError(f"mesh {mesh} has {mesh.ndim} dimensions; pass a 2-D mesh of (nodes, lanes)")
        ranks, lanes = tuple(mesh.mesh.flatten().tolist()), mesh.size(1)
        import torch.distributed as dist

        mine = [c for c in cls.communicators(ranks, lanes) if dist.get_rank() in c.ranks]
        groups = {NAMES["lane", "out"]: mesh.get_group(0), NAMES["node", "out"]: mesh.get_group(1)}
        transport = mesh_transport(mesh.device_type, mine, groups)
        return cls(
            transport, lanes=lanes, ranks=ranks, domains=domains, num_experts=num_experts, owners=owners, deadlines=deadlines
        )

    def __repr__(self) -> str:
        t = self.topology
        return (
            f"HierarchicalAllToAll(node {self.node} of {t.nodes}, lane {self.lane} of {t.lanes}, num_experts={self.num_experts})"
        )

    def own(self, owners: Sequence[int]) -> None:
        super().own(owners)
        lanes = self.topology.lanes
        self._nodes_E = torch.div(self._owners_E, lanes, rounding_mode="floor")
        self._lanes_E = self._owners_E % lanes

    # ---- the way
    def _plan(self, expert_ids_TK: Tensor) -> HaloPlan:
        return self.plan(expert_ids_TK, split=False)

    def plan(self, expert_ids_TK: Tensor, *, split: bool) -> HaloPlan:
        """The way of these tokens; counts are exchanged. ``split``: one wave per node instead of one per distance."""
        t, device = self.topology, expert_ids_TK.device
        self._nodes_E, self._lanes_E = self._nodes_E.to(device), self._lanes_E.to(device)
        route = Route.build(expert_ids_TK, self._nodes_E, t.nodes)
        rows = Route.build(expert_ids_TK, self._device_owners(device), t.nodes * t.lanes).rows
        return self._exchange_counts(route.rows, rows, split, route)[0]

    def _plan_rows(self, send_rows: tuple[int, ...], recv_rows: tuple[int, ...] | None) -> HaloPlan:
        t = self.topology
        out = tuple(sum(send_rows[n * t.lanes : (n + 1) * t.lanes]) for n in range(t.nodes))
        plan, _ = self._exchange_counts(out, send_rows, False, None)
        found = tuple(plan.final[k][n] for n in range(t.nodes) for k in range(t.lanes))
        if recv_rows is not None and recv_rows != found:
            raise ExchangeError(
                f"recv_rows={list(recv_rows)} and the other ranks send {list(found)}; pass what they send, or None"
            )
        return plan

    def _exchange_counts(
        self, out: tuple[int, ...], rows: Sequence[int], split: bool, route: Route | None, shared: Sequence[int] = ()
    ) -> tuple[HaloPlan, list[int]]:
        """(the plan, the largest of each of the ``shared`` numbers over all ranks)."""
        t, me, s = self.topology, (self.node, self.lane), len(shared)
        first = {n: [*shared, out[n], *rows[n * t.lanes : (n + 1) * t.lanes]] for n in range(t.nodes)}
        by_node = self._counts("lane", first, s + 1 + t.lanes)
        by_node[me[0]] = first[me[0]]
        largest = [max(v[i] for v in by_node.values()) for i in range(s)]
        second = {k: [*largest, *(by_node[m][s + 1 + k] for m in range(t.nodes))] for k in range(t.lanes)}
        by_lane = self._counts("node", second, s + t.nodes)
        by_lane[me[1]] = second[me[1]]
        plan = HaloPlan(
            out,
            tuple(by_node[m][s] for m in range(t.nodes)),
            [by_node[m][s + 1 :] for m in range(t.nodes)],
            [by_lane[k][s:] for k in range(t.lanes)],
            t.waves(self.node, split=split),
            route,
        )
        return plan, [max(v[i] for v in by_lane.values()) for i in range(s)]

    def _counts(self, axis: str, values: Mapping[int, Sequence[int]], width: int) -> dict[int, list[int]]:
        peers = self.peers[axis]
        if not peers:
            return {}
        got = self._wire.counts(NAMES[axis, "counts"], {r: values[i] for i, r in peers.items()}, width, self.form)
        return {i: got[r] for i, r in peers.items()}

    # ---- whole exchanges
    def _out(self, plan: HaloPlan, kind: str, fields: Sequence[Tensor]) -> list[Tensor]:
        flow = OutFlow(self, plan, kind, fields)
        for _ in plan.waves:
            flow.post_wave()
        parts: dict[int, list[list[Tensor]]] = {}
        for w in range(len(plan.waves)):
            flow.redistribute(w)
        for w in range(-1, len(plan.waves)):
            parts.update(flow.take(w))
        flow.wait_sends()
        return join([part for m in sorted(parts) for part in parts[m]], fields)

    def _back(self, plan: HaloPlan, kind: str, fields: Sequence[Tensor]) -> list[Tensor]:
        t = self.topology
        blocks = cut(fields, [plan.final[k][m] for m in range(t.nodes) for k in range(t.lanes)])
        parts = [blocks[m * t.lanes : (m + 1) * t.lanes] for m in range(t.nodes)]
        flow = BackFlow(self, plan, kind, fields)
        order = [*range(len(plan.waves)), -1]  # what has to cross goes first
        for w in order:
            flow.give(w, {m: parts[m] for m in flow.nodes(w)})
        for w in order:
            flow.advance(w)
        return flow.finish()


class _Flow:
    """One direction of one exchange on this rank. Wave -1 is the own node."""

    def __init__(self, exchange: HierarchicalAllToAll, plan: HaloPlan, kind: str, like: Sequence[Tensor], what: str) -> None:
        self.x, self.plan, self.kind, self.what = exchange, plan, kind, what
        self.fields: list[Field] = fields_of(like)
        self.device = like[0].device

    def nodes(self, wave: int) -> tuple[int, ...]:
        """Source nodes of a wave's rows."""
        return (self.x.node,) if wave < 0 else self.plan.waves[wave].receives

    def post(self, axis: str, sends: Mapping[int, Sequence[Tensor]], receives: Mapping[int, int]) -> Arriving:
        """Messages along an axis, by index on it."""
        peers = self.x.peers[axis]
        name = NAMES[axis, self.what]
        if not peers:
            return Pending(_Nothing(), 0.0, dict)
        to = {peers[i]: f for i, f in sends.items() if i in peers}
        come = {peers[i]: n for i, n in receives.items() if i in peers}
        return self.x._wire.post(name, self.kind, to, come, self.fields, device=self.device)

    def got(self, axis: str, pending: Arriving) -> dict[int, list[Tensor]]:
        """What came, by index on the axis; no rows where nothing came."""
        by_rank = pending.wait()
        return {i: by_rank.get(r, self.empty()) for i, r in self.x.peers[axis].items()}

    def empty(self) -> list[Tensor]:
        return [torch.empty(0, cols, dtype=dtype, device=self.device) for cols, dtype in self.fields]

    def concat(self, parts: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        return [torch.cat(list(f)) for f in zip(*parts, strict=True)] if parts else self.empty()


class OutFlow(_Flow):
    """Tokens (or sorted rows) out to the ranks of their experts."""

    def __init__(self, exchange: HierarchicalAllToAll, plan: HaloPlan, kind: str, fields: Sequence[Tensor]) -> None:
        super().__init__(exchange, plan, kind, fields, "out")
        nodes = range(exchange.topology.nodes)
        self.parts = cut(fields, plan.out) if plan.route is None else [spread(plan.route, n, fields) for n in nodes]
        self.crossing: list[Arriving] = []
        self.inside: dict[int, Arriving] = {}
        self.kept: dict[int, dict[int, list[Tensor]]] = {}
        if plan.waves:
            self.post_wave()  # the slow links first, then the own node at the same time
        self._send_inside(-1, {exchange.node: self.parts[exchange.node]})

    def post_wave(self) -> None:
        """Start the next wave between nodes, if one is left."""
        w = len(self.crossing)
        if w < len(self.plan.waves):
            wave = self.plan.waves[w]
            sends = {n: self.parts[n] for n in wave.sends}
            self.crossing.append(self.post("lane", sends, {m: self.plan.arrivals[m] for m in wave.receives}))

    def redistribute(self, wave: int) -> None:
        """Wait for a wave and start its hop inside the node."""
        if wave not in self.inside:
            self._send_inside(wave, self.got("lane", self.crossing[wave]))

    def _send_inside(self, wave: int, arrived: Mapping[int, list[Tensor]]) -> None:
        lanes, sources = range(self.x.topology.lanes), self.nodes(wave)
        by_lane: list[list[list[Tensor]]] = [[] for _ in lanes]
        kept: dict[int, list[Tensor]] = {}
        for m in sources:
            parts = self._expand(m, arrived[m])
            for k in lanes:
                by_lane[k].append(parts[k])
            kept[m] = parts[self.x.lane]
        self.kept[wave] = kept
        sends = {k: self.concat(by_lane[k]) for k in lanes if k != self.x.lane}
        receives = {k: sum(self.plan.final[k][m] for m in sources) for k in lanes}
        self.inside[wave] = self.post("node", sends, receives)

    def _expand(self, m: int, fields: list[Tensor]) -> list[list[Tensor]]:
        """One list of fields per lane from what came from node ``m``."""
        plan = self.plan
        if plan.route is None:
            return cut(fields, plan.forward[m])
        if m not in plan.expand:
            ids = next(f for f in fields if not f.is_floating_point())
            route = Route.build(ids, self.x._lanes_E, self.x.topology.lanes)
            if list(route.rows) != plan.forward[m]:
                raise ExchangeError(
                    f"rows from node {m} expand to {list(route.rows)} rows per lane and {plan.forward[m]} were announced; "
                    "the ranks have different expert owners, call own() with one table on all"
                )
            plan.expand[m] = route
        return [spread(plan.expand[m], k, fields) for k in range(self.x.topology.lanes)]

    def take(self, wave: int) -> dict[int, list[list[Tensor]]]:
        """Wait for a wave's rows on this rank: source node -> one list of fields per source lane."""
        self.redistribute(wave)
        sources = self.nodes(wave)
        got = self.got("node", self.inside[wave])
        out: dict[int, list[list[Tensor]]] = {m: [] for m in sources}
        kept = self.kept.pop(wave)
        for k in range(self.x.topology.lanes):
            if k == self.x.lane:
                parts = [kept[m] for m in sources]
            else:
                parts = cut(got[k], [self.plan.final[k][m] for m in sources]) if sources else []
            for m, part in zip(sources, parts, strict=True):
                out[m].append(part)
        return out

    def wait_sends(self) -> None:
        """Everything this rank sent has left (receives of a handle are waited with its sends)."""
        for pending in [*self.crossing, *self.inside.values()]:
            pending.wait()


class BackFlow(_Flow):
    """Rows back to the ranks of their tokens, summed per node, then per token."""

    def __init__(self, exchange: HierarchicalAllToAll, plan: HaloPlan, kind: str, fields: Sequence[Tensor]) -> None:
        super().__init__(exchange, plan, kind, fields, "back")
        self.inside: dict[int, tuple[Arriving, dict[int, list[Tensor]]]] = {}
        self.crossing: dict[int, Arriving] = {}
        self.results: dict[int, list[Tensor]] = {}

    def give(self, wave: int, parts: Mapping[int, list[list[Tensor]]]) -> None:
        """Start the way back of a wave: source node -> one list of fields per source lane."""
        lanes, sources = range(self.x.topology.lanes), self.nodes(wave)
        sends = {k: self.concat([parts[m][k] for m in sources]) for k in lanes if k != self.x.lane}
        receives = {k: sum(self.plan.forward[m][k] for m in sources) for k in lanes}
        kept = {m: parts[m][self.x.lane] for m in sources}
        self.inside[wave] = self.post("node", sends, receives), kept

    def advance(self, wave: int) -> None:
        """Wait for the node's results of a wave, sum them, and start their way to the source node."""
        pending, kept = self.inside.pop(wave)
        got, sources = self.got("node", pending), self.nodes(wave)
        lanes = range(self.x.topology.lanes)
        blocks = {
            k: cut(got[k], [self.plan.forward[m][k] for m in sources]) if sources else [] for k in lanes if k != self.x.lane
        }
        results: dict[int, list[Tensor]] = {}
        for i, m in enumerate(sources):
            parts = [kept[m] if k == self.x.lane else blocks[k][i] for k in lanes]
            results[m] = self.concat(parts) if self.plan.route is None else gather(self.plan.expand[m], parts)
        if wave < 0:
            self.results[self.x.node] = results[self.x.node]
        else:
            sent = self.plan.waves[wave].sends
            self.crossing[wave] = self.post("lane", results, {n: self.plan.out[n] for n in sent})

    def finish(self) -> list[Tensor]:
        """Wait for all nodes' results: one row per token (or per sorted row)."""
        for wave, pending in self.crossing.items():
            got = self.got("lane", pending)
            self.results.update({n: got[n] for n in self.plan.waves[wave].sends})
        parts = [self.results[n] for n in range(self.x.topology.nodes)]
        return self.concat(parts) if self.plan.route is None else gather(self.plan.route, parts)


class _Nothing:
    """The work of an axis without peers."""

    def done(self) -> bool:
        return True

    def wait(self, timeout: float) -> None:
        del timeout
