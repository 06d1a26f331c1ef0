# mypy: disable-error-code="override,assignment"
"""torch.distributed on simulated ranks: a c10d back end between threads, with point-to-point, collectives, deadlines and a log.

For code that calls torch.distributed itself: ``run_ranks(fn, world, backend="sim-dist")``. Every rank is a thread with a
default process group of its own; sub-groups and DeviceMesh work. It rests on torch's private threaded test world, so it lives
in the test kit and nowhere else. The random number generator is shared by all threads: give each rank a ``torch.Generator``.
"""

from __future__ import annotations

import datetime
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchmoe.comm.transport import Message
from torchmoe.errors import ExchangeError, ExchangeTimeout, PeerLost

__all__ = ["DistHub", "threaded_world"]


class DistHub:
    """What the ranks of one run share."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.sends: dict[Any, deque[_Entry]] = defaultdict(deque)
        self.recvs: dict[Any, deque[_Entry]] = defaultdict(deque)
        self.collectives: dict[Any, _Collective] = {}
        self.log: list[Message] = []
        self.failed: str | None = None

    def fail(self, text: str) -> None:
        with self.changed:
            self.failed = self.failed or text
            self.changed.notify_all()


class _Entry:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.ended = tensor, False


class _Collective:
    def __init__(self) -> None:
        self.calls: dict[int, tuple[str, Any]] = {}
        self.ended = False


class _Work(dist.Work):
    def __init__(self, wait: Callable[[float | None], None], done: Callable[[], bool], result: list[Tensor]) -> None:
        super().__init__()
        self._wait, self._done, self._result = wait, done, result

    def wait(self, timeout: Any = None) -> bool:
        seconds = timeout.total_seconds() if timeout is not None and timeout.total_seconds() > 0 else None
        self._wait(seconds)
        return True

    def is_completed(self) -> bool:
        return self._done()

    def get_future(self) -> Any:
        future: Any = torch.futures.Future()
        self.wait()
        future.set_result(self._result)
        return future


class SimProcessGroup(dist.ProcessGroup):  # the base's signatures are those of C++: options are never optional there
    """A process group whose ranks are threads. Operations end when all who take part have called them."""

    def __init__(self, hub: DistHub, rank: int, size: int, timeout: float) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._hub, self._rank, self._size, self._limit = hub, rank, size, timeout
        self._number: Counter[str] = Counter()

    def getBackendName(self) -> str:
        return "sim"

    @property
    def group_name(self) -> str:
        return str(dist.distributed_c10d._world.pg_names[self])

    @property
    def pg_name(self) -> str:
        return self.group_name

    # ---- point to point: FIFO per (group, source, destination, tag), rendezvous
    def send(self, tensors: list[Tensor], dst: int, tag: int = 0) -> _Work:
        return self._p2p("send", tensors[0], self._rank, dst, tag)

    def recv(self, tensors: list[Tensor], src: int, tag: int = 0) -> _Work:
        return self._p2p("recv", tensors[0], src, self._rank, tag)

    def _p2p(self, side: str, tensor: Tensor, source: int, destination: int, tag: int) -> _Work:
        hub, key, entry = self._hub, (self.group_name, source, destination, tag), _Entry(tensor)
        what = f"{side} {tuple(tensor.shape)} {tensor.dtype} from {source} to {destination} tag {tag} on {self.group_name}"
        with hub.changed:
            (hub.sends if side == "send" else hub.recvs)[key].append(entry)
            sends, recvs = hub.sends[key], hub.recvs[key]
            if sends and recvs:
                a, b = sends.popleft(), recvs.popleft()
                if a.tensor.numel() != b.tensor.numel() or a.tensor.dtype != b.tensor.dtype:
                    hub.failed = hub.failed or (
                        f"{what}: sent {tuple(a.tensor.shape)} {a.tensor.dtype}, "
                        f"expected {tuple(b.tensor.shape)} {b.tensor.dtype}"
                    )
                else:
                    b.tensor.detach().copy_(a.tensor.detach().view_as(b.tensor))
                    hub.log.append(Message(self.group_name, source, destination, a.tensor.numel() * a.tensor.element_size()))
                a.ended = b.ended = True
            hub.changed.notify_all()
        return self._work(lambda: entry.ended, lambda: what, [tensor])

    # ---- collectives: the last to come checks that all call the same and executes
    def _collective(self, op: str, data: Any, execute: Callable[[dict[int, Any]], None], result: list[Tensor]) -> _Work:
        hub, name = self._hub, self.group_name
        self._number[name] += 1
        key = (name, self._number[name])
        with hub.changed:
            c = hub.collectives.setdefault(key, _Collective())
            c.calls[self._rank] = (op, data)
            if len(c.calls) == self._size:
                ops = {r: o for r, (o, _) in sorted(c.calls.items())}
                if len(set(ops.values())) > 1:
                    hub.failed = hub.failed or f"collective number {key[1]} of group {name} differs between ranks: {ops}"
                else:
                    try:
                        execute({r: d for r, (_, d) in c.calls.items()})
                    except Exception as e:
                        hub.failed = hub.failed or f"{op} number {key[1]} of group {name}: {e}"
                c.ended = True
                del hub.collectives[key]
                hub.changed.notify_all()

        def what() -> str:
            return f"{op} number {key[1]} of group {name}, missing ranks {sorted(set(range(self._size)) - set(c.calls))}"

        return self._work(lambda: c.ended, what, result)

    def _work(self, ended: Callable[[], bool], what: Callable[[], str], result: list[Tensor]) -> _Work:
        hub = self._hub

        def wait(seconds: float | None) -> None:
            limit = self._limit if seconds is None else seconds
            end = time.monotonic() + limit
            with hub.changed:
                while not ended() and hub.failed is None:
                    left = end - time.monotonic()
                    if left <= 0:
                        raise ExchangeTimeout(f"rank {self._rank}: {what()}: not within {limit:g} s")
                    hub.changed.wait(left)
                if hub.failed is not None:
                    kind = PeerLost if hub.failed.startswith("rank ") else ExchangeError
                    raise kind(f"rank {self._rank}: {what()}: {hub.failed}")

        return _Work(wait, ended, result)

    def _moved(self, source: int, destination: int, tensor: Tensor) -> None:
        if source != destination and tensor.numel():
            self._hub.log.append(Message(self.group_name, source, destination, tensor.numel() * tensor.element_size()))

    def all_to_all_single(self, output: Tensor, input: Tensor, out_splits: Any, in_splits: Any, opts: Any = None) -> _Work:
        n = self._size
        ins = list(in_splits) or [input.shape[0] // n] * n
        outs = list(out_splits) or [output.shape[0] // n] * n

        def execute(d: dict[int, Any]) -> None:
            for a in range(n):
                for b in range(n):
                    if d[a][2][b] != d[b][3][a]:
                        raise ValueError(f"rank {a} sends {d[a][2][b]} rows to rank {b}, which expects {d[b][3][a]}")
            for b in range(n):
                parts = [torch.split(d[a][1].detach(), d[a][2])[b] for a in range(n)]
                d[b][0].detach().copy_(torch.cat(parts))
                for a in range(n):
                    self._moved(a, b, parts[a])

        return self._collective("all_to_all_single", (output, input, ins, outs), execute, [output])

    alltoall_base = all_to_all_single

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> _Work:
        def execute(d: dict[int, Any]) -> None:
            for b in range(self._size):
                for a in range(self._size):
                    d[b][0][a].detach().copy_(d[a][1][b].detach())
                    self._moved(a, b, d[a][1][b])

        return self._collective("alltoall", (outputs, inputs), execute, outputs)

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> _Work:
        op = _reduce_op(opts)

        def execute(d: dict[int, Any]) -> None:
            total = _reduce([d[r] for r in range(self._size)], op)
            for t in d.values():
                t.detach().copy_(total)

        return self._collective("allreduce", tensors[0], execute, tensors)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> _Work:
        op = _reduce_op(opts)

        def execute(d: dict[int, Any]) -> None:
            for i in range(len(tensors)):
                total = _reduce([d[r][i] for r in range(self._size)], op)
                for ts in d.values():
                    ts[i].detach().copy_(total)

        return self._collective("allreduce_coalesced", tensors, execute, tensors)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> _Work:
        root = opts.rootRank if opts is not None else 0

        def execute(d: dict[int, Any]) -> None:
            for r, t in d.items():
                if r != root:
                    t.detach().copy_(d[root].detach())

        return self._collective("broadcast", tensors[0], execute, tensors)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> _Work:
        def execute(d: dict[int, Any]) -> None:
            for outs, _ in d.values():
                for a in range(self._size):
                    outs[a].detach().copy_(d[a][1].detach())

        return self._collective("allgather", (outputs[0], inputs[0]), execute, outputs[0])

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> _Work:
        def execute(d: dict[int, Any]) -> None:
            whole = torch.cat([d[a][1].detach().reshape(-1) for a in range(self._size)])
            for out, _ in d.values():
                out.detach().copy_(whole.view_as(out))

        return self._collective("all_gather_single", (output, input), execute, [output])

    _allgather_base = all_gather_single

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> _Work:
        op = _reduce_op(opts)

        def execute(d: dict[int, Any]) -> None:
            total = _reduce([d[r][1] for r in range(self._size)], op).reshape(-1)
            for part, r in zip(total.chunk(self._size), range(self._size), strict=True):
                d[r][0].detach().copy_(part.view_as(d[r][0]))

        return self._collective("reduce_scatter_single", (output, input), execute, [output])

    _reduce_scatter_base = reduce_scatter_single

    def barrier(self, opts: Any = None) -> _Work:
        return self._collective("barrier", None, lambda d: None, [])


def _reduce_op(opts: Any) -> Any:
    op = opts.reduceOp if opts is not None else dist.ReduceOp.SUM
    return getattr(op, "op", op)


def _reduce(tensors: list[Tensor], op: Any) -> Tensor:
    """In rank order, so that reruns are bit-equal."""
    total = tensors[0].detach().clone()
    for t in tensors[1:]:
        if op == dist.ReduceOp.MAX:
            total = torch.maximum(total, t.detach())
        elif op == dist.ReduceOp.MIN:
            total = torch.minimum(total, t.detach())
        elif op == dist.ReduceOp.PRODUCT:
            total = total * t.detach()
        elif op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            total = total + t.detach()
        else:
            raise ValueError(f"reduce operation {op} is not simulated")
    return total / len(tensors) if op == dist.ReduceOp.AVG else total


_WORLD = threading.Lock()  # torch's threaded world is one per process


@contextmanager
def threaded_world(hub: DistHub) -> Iterator[Callable[[int, int, float], None]]:
    """Inside, every thread has a torch.distributed of its own; yields ``init(rank, world, timeout)`` for the threads to call."""
    from torch._C._distributed_c10d import _set_thread_isolation_mode  # type: ignore[attr-defined]
    from torch.testing._internal.distributed.multi_threaded_pg import _install_threaded_pg, _uninstall_threaded_pg

    with _WORLD:
        if dist.is_initialized():
            raise ExchangeError(
                "sim-dist cannot run in a process that has initialized torch.distributed; destroy its group first"
            )
        _set_thread_isolation_mode(True)
        world = _install_threaded_pg()  # type: ignore[no-untyped-call]
        if not hasattr(world, "comms"):  # torch 2.11 and 2.12: destroy_process_group reads what the threaded world lacks
            world.comms = []
        store = dist.HashStore()  # type: ignore[attr-defined]

        def create(_: Any, rank: int, size: int, timeout: datetime.timedelta) -> SimProcessGroup:
            return SimProcessGroup(hub, rank, size, timeout.total_seconds())

        dist.Backend.register_backend("sim", create, devices=["cpu"])  # again in every run: it replaces the last one's hub

        def init(rank: int, world: int, timeout: float) -> None:
            limit = datetime.timedelta(seconds=timeout)
            dist.init_process_group("sim", rank=rank, world_size=world, store=store, timeout=limit)

        try:
            yield init
        finally:
            _uninstall_threaded_pg()  # type: ignore[no-untyped-call]
            _set_thread_isolation_mode(False)
