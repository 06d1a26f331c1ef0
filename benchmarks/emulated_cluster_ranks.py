"""One rank of the emulated cluster: the real engine, roles, exchange and gloo transport over a device that only takes time.

A computation occupies the rank's one compute engine for its modelled time; like on a GPU, the issuing thread goes on, and a send
starts when the computations before it have ended. Receives are posted at once and waits stop the issuing thread, as in the
runner on CUDA.
"""

from __future__ import annotations

import gc
import os
import pickle
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.emulated_cluster_device import TIMEOUT, Device, StreamTransport
from benchmarks.emulated_cluster_model import LAYERS, TOKENS, WORLD, Scheme
from benchmarks.emulated_cluster_net import Cluster, Loopback
from torchmoe.comm.m2n import Key, M2NExchange, Pending
from torchmoe.comm.transport import P2P
from torchmoe.errors import ScheduleError
from torchmoe.pipeline.action import Action, Op
from torchmoe.pipeline.network import Host, Links
from torchmoe.pipeline.runtime.engine import Engine
from torchmoe.pipeline.runtime.recorder import Recorder
from torchmoe.pipeline.runtime.ride import RideExperts
from torchmoe.pipeline.runtime.runner import Runner
from torchmoe.pipeline.runtime.stage import AttentionOutput, MicroBatch, Stages, WeightWork
from torchmoe.pipeline.trace import Event
from torchmoe.placement import Communicator, Deadlines, Placement
from torchmoe.router import Routing

__all__ = ["Measured", "measure_links", "measure_units", "run_schemes"]


# ---- A/F ranks: the real runner over stages that take time
class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h_TD: Tensor, stage: _Attention, label: str) -> Tensor:
        ctx.stage, ctx.label = stage, label
        stage.device.work(stage.seconds(Action.parse(label)), label)
        return h_TD.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        label = ctx.label.replace("F", "B")
        ctx.stage.device.work(ctx.stage.seconds(Action.parse(label)), label)
        return grads[0], None, None


@dataclass
class _Attention:
    layer: int
    device: Device
    seconds: Callable[[Action], float]
    num_experts: int

    def __call__(self, res_TD: Tensor, mb: MicroBatch) -> AttentionOutput:
        h_TD = _Attend.apply(res_TD, self, f"{2 * self.layer}F{mb.index}")
        ids = torch.arange(len(h_TD), dtype=torch.int64)[:, None] % self.num_experts
        return AttentionOutput(h_TD, h_TD, Routing(ids, torch.ones(len(h_TD), 1)))


@dataclass
class _Weights:
    device: Device
    seconds: float
    label: str

    def run(self) -> None:
        self.device.work(self.seconds, self.label)


@dataclass
class _Experts:
    layer: int
    device: Device
    seconds: Callable[[Action], float]
    order: list[int] = field(default_factory=list)
    back: list[int] = field(default_factory=list)

    def forward_saved(self, rows_RD: Tensor, ids_RK: Tensor, gates_RK: Tensor) -> tuple[Tensor, Any]:
        m = self.order.pop(0)
        label = f"{2 * self.layer + 1}F{m}"
        self.device.work(self.seconds(Action.parse(label)), label)
        return rows_RD.clone(), (m, gates_RK)

    def backward_input(self, saved: Any, dy_RD: Tensor) -> tuple[Tensor, Tensor, WeightWork]:
        m, gates_RK = saved
        stage = 2 * self.layer + 1
        self.device.work(self.seconds(Action(stage, Op.BACKWARD_INPUT, m)), f"{stage}I{m}")
        weights = _Weights(self.device, self.seconds(Action(stage, Op.BACKWARD_WEIGHT, m)), f"{stage}W{m}")
        return dy_RD, torch.zeros_like(gates_RK), weights


def row_width(scheme: Scheme) -> int:
    """fp32 columns of a row so that one dispatch has the scheme's bytes, gates, ids, padding and headers included."""
    assert scheme.placement is not None
    m, n = scheme.placement.attention[0], scheme.placement.ffn[0]
    record = scheme.costs.message["dispatch"] / m / (TOKENS + n)
    return max(4, int(record // 16) * 4 - 4)


def _af_rank(scheme: Scheme, transport: StreamTransport, device: Device, rank: int) -> Callable[[], list[Event]]:
    placement = scheme.placement
    assert placement is not None
    placement = Placement(
        attention=placement.attention,
        ffn=placement.ffn,
        num_layers=LAYERS,
        num_experts=placement.num_experts,
        deadlines=Deadlines(exchange=TIMEOUT, step=2 * TIMEOUT, init=3 * TIMEOUT),
    )
    width = row_width(scheme)
    counted = any(a.edge == "counts" for acts in scheme.schedule.lists.values() for a in acts)
    exchange = M2NExchange(
        placement,
        transport,
        dim=width,
        top_k=1,
        residual=scheme.residual,
        sizes="exact" if counted else "fixed",
        capacity=None if counted else TOKENS // placement.ffn[0],
    )
    where, seconds = placement.where(rank), scheme.costs.seconds
    n = scheme.schedule.num_microbatches
    stages = Stages()
    units = placement.stages(where.group)
    if where.role == "attention":
        weight = torch.zeros((), requires_grad=True)
        stages.attention = {s // 2: _Attention(s // 2, device, seconds, placement.num_experts) for s in units if s < 2 * LAYERS}
        stages.embedding = lambda mb: torch.zeros(TOKENS, width) + weight
        stages.head = lambda h_TD, mb: h_TD[:1, :1].sum()
    else:
        acts = scheme.schedule.lists[str(where.group)]
        mbs = {s: [a.microbatch or 0 for a in acts if a[:2] == (s, Op.FORWARD)] for s in units}
        experts = {s // 2: _Experts(s // 2, device, seconds, mbs[s]) for s in units}
        ride = scheme.residual == "ride"
        stages.experts = {k: RideExperts(e, lambda h: h * 1.0) if ride else e for k, e in experts.items()}
        orders = {k: list(e.order) for k, e in experts.items()}
    runner = Runner(placement, scheme.schedule, stages=stages, exchange=exchange, trace=True)
    tokens = torch.zeros(1, TOKENS, dtype=torch.int64)
    lengths = [(TOKENS,) * placement.attention[0]] * n

    def step() -> list[Event]:
        if where.role == "ffn":
            for k, e in experts.items():
                e.order = list(orders[k])
            runner.step()
        else:
            runner.step(arg_mbs=[(tokens,)] * n, target_mbs=[None] * n, losses=[], lengths=lengths)
        return [e for e in runner.events if e.kind != "compute"]

    return step


# ---- colocated ranks: the same engine with a role of all-to-alls
class ColocatedRole:
    """Buffers of the right size to and from every rank of the group, and computations that take time."""

    def __init__(self, scheme: Scheme, transport: StreamTransport, device: Device, rank: int) -> None:
        self.scheme, self.transport, self.device, self.rank = scheme, transport, device, rank
        self.size = scheme.wiring.size("0")
        self.group = rank // self.size
        self.num_groups = len(scheme.wiring.groups)

    def key(self, action: Action) -> Key:
        if action.edge is None or action.edge.startswith("chunk"):
            return Key(action.stage, action.microbatch or 0)
        return Key(self.scheme.wiring.end(action).layer, action.microbatch or 0)

    def shard(self, action: Action) -> None:
        raise ScheduleError(
            f"{action}: emulated ranks have no parameters to gather or reduce; leave UNSHARD, RESHARD and REDUCE_GRAD out"
        )

    def compute(self, action: Action, key: Key) -> None:
        self.device.work(self.scheme.costs.seconds(action), str(action))

    def _ops(self, side: str, edge: str) -> list[P2P]:
        total = self.scheme.costs.num_bytes(edge, None)
        first = self.group * self.size
        if edge in ("act", "d_act"):
            step = self.size if (side == "send") == (edge == "act") else -self.size
            return [P2P(side, (self.rank + step) % WORLD, torch.empty(round(total / self.size), dtype=torch.uint8))]  # type: ignore[arg-type]
        n = round(total / self.size / (self.size - 1))
        peers = [first + (self.rank - first + d) % self.size for d in range(1, self.size)]  # everyone starts elsewhere
        return [P2P(side, q, torch.empty(n, dtype=torch.uint8)) for q in peers]  # type: ignore[arg-type]

    def _pending(self, side: str, edge: str, key: Key) -> Pending[None]:
        ops = self._ops(side, edge)
        name = f"{edge.split('.')[0]}"
        if edge in ("act", "d_act"):
            other = ops[0].peer // self.size
            pair = (self.group, other) if side == "send" else (other, self.group)
            name += f":{pair[0]}>{pair[1]}"
        else:
            name += f":{self.group}"
        what = f"{side} {edge} of layer {key.layer}, micro-batch {key.microbatch}"
        size = sum(op.buffer.numel() for op in ops)
        return Pending(self.transport.post(name, ops, what), TIMEOUT, lambda: None, what=what, num_bytes=size)

    def send(self, edge: str, key: Key) -> Pending[None]:
        return self._pending("send", edge, key)

    def post(self, edge: str, key: Key) -> Pending[Any]:
        return self._pending("recv", edge, key)

    def receive(self, edge: str, key: Key, value: Any) -> None:
        return None

    def left(self) -> list[Key]:
        return []


class ChunkEngine(Engine):
    """The engine, and computations in parts (``3F0:chunk.1``), which the A/F roles do not have."""

    def _act(self, action: Action) -> None:
        if action.edge is not None and action.edge.startswith("chunk"):
            self._role.compute(action, self._role.key(action))
        else:
            super()._act(action)


def communicators(scheme: Scheme) -> list[Communicator]:
    """All communicators of a scheme in one order for all ranks."""
    if scheme.placement is not None:
        assert scheme.residual is not None
        return list(scheme.placement.communicators(scheme.residual))
    out = []
    size = scheme.wiring.size("0")
    groups = len(scheme.wiring.groups)
    for g in range(groups):
        ranks = tuple(range(g * size, (g + 1) * size))
        out += [Communicator(f"{kind}:{g}", ranks, False) for kind in ("dispatch", "combine", "d_combine", "d_dispatch")]
    for g in range(groups):
        for h in {(g + 1) % groups, (g - 1) % groups} if groups > 1 else set():
            ranks = tuple(sorted((*range(g * size, (g + 1) * size), *range(h * size, (h + 1) * size))))
            out += [Communicator(f"{kind}:{g}>{h}", ranks, False) for kind in ("act", "d_act")]
    return out


@dataclass
class Measured:
    """One repetition of one scheme on one rank: end of the last computation, busy and overslept seconds, events."""

    end: float
    busy: float
    cpu: float
    events: list[Event]


def run_schemes(cluster: Cluster | Loopback, items: Sequence[Scheme], repetitions: int) -> dict[str, list[list[Measured]]]:
    """Scheme name -> repetitions -> ranks. All ranks are forked once."""
    results = _spawn(cluster, _rank_main, items, repetitions)
    return {s.name: [[r[s.name][k] for r in results] for k in range(repetitions)] for s in items}


def _rank_main(rank: int, cluster: Cluster | Loopback, items: Sequence[Scheme], repetitions: int) -> dict[str, list[Measured]]:
    out: dict[str, list[Measured]] = {}
    gc.disable()
    for scheme in items:
        group = _group_of(scheme, rank)
        device = Device(rank, group)
        transport = StreamTransport(cluster, communicators(scheme), device)
        if scheme.placement is not None:
            step = _af_rank(scheme, transport, device, rank)
        else:
            recorder = Recorder(rank, group)
            engine = ChunkEngine(ColocatedRole(scheme, transport, device, rank), recorder)

            step = partial(_colocated_step, engine, recorder, scheme.schedule.lists[group])

        for _ in range(repetitions):
            device.events.clear()
            cpu = time.process_time()
            start = _together()
            events = step()
            device.drain()
            shifted = [e._replace(start=e.start - start, end=e.end - start) for e in (*device.events, *events)]
            busy = sum(e.end - e.start for e in device.events)
            out.setdefault(scheme.name, []).append(Measured(device.last_end - start, busy, time.process_time() - cpu, shifted))
            gc.collect()
        _together()
        device.close()
        transport.close()
    return out


def _colocated_step(engine: Engine, recorder: Recorder, actions: Sequence[Action]) -> list[Event]:
    engine.run(actions)
    return [e for e in recorder.events if e.kind != "compute"]


def _group_of(scheme: Scheme, rank: int) -> str:
    first = 0
    for g in scheme.wiring.groups:
        if rank < first + scheme.wiring.size(g):
            return g
        first += scheme.wiring.size(g)
    raise AssertionError(rank)


def _together() -> float:
    """A moment that all ranks agree on and wait for."""
    t = torch.tensor([time.monotonic()], dtype=torch.float64)
    dist.all_reduce(t, dist.ReduceOp.MAX)
    start = t.item() + 0.1
    time.sleep(max(0.0, start - time.monotonic()))
    return start


# ---- links
def measure_units(cluster: Cluster | Loopback, items: Mapping[str, Scheme], host: Host) -> dict[str, Host]:
    """Host costs by kind: dry steps of one scheme each, whose computations take no time and whose messages are small."""
    dry = {kind: s.dry() for kind, s in items.items()}
    runs_of = run_schemes(cluster, list(dry.values()), 2)
    out = {}
    for kind, s in dry.items():
        runs = runs_of[s.name]
        units = ends = 0.0
        for g, acts in s.schedule.lists.items():
            units += s.wiring.size(g) * sum(
                len(a.parts) for a in acts if (a.is_compute or a.sub) and a.op is not Op.BACKWARD_WEIGHT
            )
            posts = (a for a in acts if a.op in (Op.SEND_F, Op.SEND_B, Op.WAIT_F, Op.WAIT_B))
            ends += sum(s.wiring.pairs(s.wiring.end(a), g) for a in posts)
        cpu = sum(m.cpu for m in runs[-1])
        out[kind] = replace(host, unit=max(0.0, cpu - ends * host.message) / units)
    return out


def measure_links(cluster: Cluster | Loopback) -> tuple[Links, Host]:
    """The links' payload bandwidth, latency and bucket, and what messages cost the host, fitted to messages around a ring.

    Bandwidth from a train of messages after its first (which has the bucket's credit), latency from a message too small to
    notice the rate, the bucket from what one message after a pause takes less than both say. The host's cost per message is
    the CPU time of a train of small ones.
    """
    results = _spawn(cluster, _ring)
    train, small, single, cpu = (_median([r[i] for r in results]) for i in range(4))
    bandwidth = (_TRAIN - 1) * _LARGE / train
    links = Links(bandwidth=bandwidth, latency=small, burst=max(0.0, _LARGE - (single - small) * bandwidth))
    return links, Host(message=cpu / 2, cores=os.cpu_count() or 1)


_LARGE, _SMALL, _TRAIN, _MANY = 200_000, 256, 6, 60


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


def _ring(rank: int, cluster: Cluster | Loopback) -> tuple[float, ...]:
    """Medians: seconds of a train from its first arrival on, of a small message, of a large one after a pause; CPU seconds of
    sending and receiving a small one."""
    device = Device(rank, "")
    wire = StreamTransport(cluster, [Communicator("ring", tuple(range(WORLD)), False)], device)

    def send(size: int, count: int) -> tuple[list[float], float]:
        """Seconds after the common start at which each message is here, and CPU seconds per message."""
        ends = []
        buffers = [torch.empty(size, dtype=torch.uint8) for _ in range(count)]
        receives = [wire.post("ring", [P2P("recv", (rank - 1) % WORLD, b)], "ring") for b in buffers]
        start, cpu = _together(), time.process_time()
        sends = [wire.post("ring", [P2P("send", (rank + 1) % WORLD, torch.empty_like(b))], "ring") for b in buffers]
        for work in receives:
            work.wait(TIMEOUT)
            ends.append(time.monotonic() - start)
        for work in sends:
            work.wait(TIMEOUT)
        return ends, (time.process_time() - cpu) / count

    send(_LARGE, 2)  # opens the connections' windows
    trains = [send(_LARGE, _TRAIN) for _ in range(3)]
    smalls = [send(_SMALL, 1)[0][0] for _ in range(5)]
    singles = [send(_LARGE, 1)[0][0] for _ in range(5)]
    cpu = _median([send(_SMALL, _MANY)[1] for _ in range(3)])
    device.close()
    wire.close()
    return _median([t[-1] - t[0] for t, _ in trains]), _median(smalls), _median(singles), cpu


# ---- processes
def _spawn(cluster: Cluster | Loopback, fn: Callable[..., Any], *args: Any) -> list[Any]:
    """Fork one process per rank, run ``fn(rank, cluster, *args)`` in it, return the results in rank order."""
    children = []
    port = 29000 + os.getpid() % 1000
    for rank in range(WORLD):
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(read)
            _child(rank, cluster, port, write, fn, args)
        os.close(write)
        children.append((pid, read))
    results = []
    for pid, read in children:
        with os.fdopen(read, "rb") as f:
            try:
                results.append(pickle.load(f))
            except EOFError:
                results.append(RuntimeError(f"process {pid} died"))
        os.waitpid(pid, 0)
    errors = [r for r in results if isinstance(r, Exception)]
    if errors:  # the one that the others only noticed
        raise next((e for e in errors if "closed by peer" not in str(e)), errors[0])
    return results


def _child(rank: int, cluster: Cluster | Loopback, port: int, write: int, fn: Callable[..., Any], args: Any) -> None:
    result: Any
    try:
        cluster.enter(rank)
        torch.set_num_threads(1)
        address = f"tcp://{cluster.address(0)}:{port}"
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=WORLD, timeout=timedelta(seconds=TIMEOUT))
        result = fn(rank, cluster, *args)
        dist.barrier()
    except BaseException:
        result = RuntimeError(f"rank {rank}: {traceback.format_exc()}")
    with os.fdopen(write, "wb") as f:
        pickle.dump(result, f)
    os._exit(0)
