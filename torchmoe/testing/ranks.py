"""Run one function on many ranks: threads over the ``sim`` transport, or processes over gloo."""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import io
import multiprocessing as mp
import os
import pickle
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, Literal, Protocol

from torchmoe.comm.transport import Transport
from torchmoe.errors import ConfigError, ExchangeError, PeerLost, TorchMoEError
from torchmoe.placement import Communicator, Deadlines
from torchmoe.testing.sim import Mode, SimHub, SimTransport

__all__ = ["RankContext", "RankFailure", "RanksFailed", "run_ranks"]


@dataclass(frozen=True)
class RankFailure:
    """How one rank ended badly.

    Args:
        rank: which.
        error: the exception it raised, if it could be carried here; else None.
        text: one line: the exception, the signal that killed it, or that it did not end in time.
        trace: its traceback.
        seconds: after how long.
    """

    rank: int
    error: BaseException | None
    text: str
    trace: str = ""
    seconds: float = 0.0


class RanksFailed(TorchMoEError, RuntimeError):
    """At least one rank failed. ``failures`` holds them, the first cause first."""

    def __init__(self, failures: Sequence[RankFailure]) -> None:
        self.failures = list(failures)
        lines = [f"rank {f.rank}: {f.text}" for f in self.failures[:8]]
        more = f"\n... and {len(self.failures) - 8} more" if len(self.failures) > 8 else ""
        super().__init__("\n".join([f"{len(self.failures)} ranks failed", *lines]) + more + "\n" + self.failures[0].trace)


class RankContext(Protocol):
    """What a rank's function gets."""

    rank: int
    world: int
    backend: str

    def transport(self, communicators: Sequence[Communicator], *, record: bool = False) -> Transport:
        """A transport over ``communicators``. Collective: every rank calls it with the same list."""

    def barrier(self) -> None:
        """Return when every rank has called it."""


def run_ranks(
    fn: Callable[..., Any],
    world: int,
    *,
    backend: Literal["sim", "sim-dist", "gloo"] = "sim",
    timeout: float = 60.0,
    args: tuple[Any, ...] = (),
    mode: Mode = "async",
    check: bool = True,
    hub: SimHub | None = None,
) -> list[Any]:
    """Call ``fn(ctx, *args)`` on ``world`` ranks and return what each returned, by rank. Nothing outlives ``timeout``.

    On ``sim`` the ranks are threads of this process: deadlocks are proven, ``fn`` may be a closure, the global random number
    generator is shared by all ranks (use a ``torch.Generator`` each). On ``gloo`` they are processes with one thread each;
    ``fn`` and ``args`` must be picklable (``fn`` at module level), torch.distributed is initialized.

    Args:
        fn: the program of one rank. Its first argument is a :class:`RankContext`.
        world: number of ranks.
        backend: ``sim``, ``sim-dist`` (the same, and code may call torch.distributed itself) or ``gloo``.
        timeout: seconds for the whole run. Ranks that still run are ended and count as failed.
        args: more arguments, the same for every rank.
        mode: what an operation of the ``sim`` back end waits for (see :mod:`torchmoe.testing.sim`).
        check: raise if a rank failed. If False, a failed rank's result is its :class:`RankFailure`.
        hub: own :class:`SimHub`, to read its log or to delay messages.

    Raises:
        RanksFailed: a rank raised, died, or did not end in time.
        ConfigError: arguments that cannot work.
    """
    if world < 1:
        raise ConfigError(f"world={world} must be at least 1")
    if backend in ("sim", "sim-dist"):
        results = _run_sim(fn, hub or SimHub(world, mode=mode), timeout, args, distributed=backend == "sim-dist")
    elif backend == "gloo":
        results = _run_gloo(fn, world, timeout, args)
    else:
        raise ConfigError(f"backend={backend!r} is unknown; use 'sim' or 'sim-dist' (threads) or 'gloo' (processes)")
    failures = [r for r in results if isinstance(r, RankFailure)]
    if failures and check:
        # a rank that lost a peer is a consequence, not the cause
        raise RanksFailed(sorted(failures, key=lambda f: (isinstance(f.error, PeerLost), f.seconds)))
    return results


# ---- threads
class _SimContext:
    backend = "sim"

    def __init__(self, shared: _Shared, rank: int) -> None:
        self.rank, self.world, self._shared, self._number = rank, shared.hub.world, shared, 0

    def transport(self, communicators: Sequence[Communicator], *, record: bool = False) -> Transport:
        number, self._number = self._number, self._number + 1
        self._shared.agree(number, self.rank, tuple(communicators))
        return SimTransport(self._shared.hub, self.rank, number, communicators, record=record)

    def barrier(self) -> None:
        self._shared.barrier.wait()


class _Barrier:
    """A barrier that whoever reached it together leaves together: a rank that fails right after it breaks only the next one."""

    def __init__(self, parties: int, timeout: float) -> None:
        self._parties, self._timeout = parties, timeout
        self._changed = threading.Condition()
        self._waiting = self._round = 0
        self._broken = False

    def wait(self) -> None:
        with self._changed:
            mine = self._round
            self._waiting += 1
            if self._waiting == self._parties and not self._broken:
                self._waiting, self._round = 0, mine + 1
                self._changed.notify_all()
            self._changed.wait_for(lambda: self._round > mine or self._broken, self._timeout)
            if self._round == mine:
                self._broken = True
                raise threading.BrokenBarrierError

    def abort(self) -> None:
        with self._changed:
            self._broken = True
            self._changed.notify_all()


class _Shared:
    def __init__(self, hub: SimHub, timeout: float) -> None:
        self.hub = hub
        self.barrier = _Barrier(hub.world, timeout)
        self._lists: dict[int, tuple[int, tuple[Communicator, ...]]] = {}
        self._lock = threading.Lock()

    def agree(self, number: int, rank: int, communicators: tuple[Communicator, ...]) -> None:
        with self._lock:
            first, expected = self._lists.setdefault(number, (rank, communicators))
        if communicators != expected:
            pairs = zip([*communicators, None], [*expected, None], strict=False)
            mine, theirs = next((a, b) for a, b in pairs if a != b)
            raise ConfigError(
                f"rank {rank} creates communicator {mine} where rank {first} creates {theirs}; use one list on all ranks"
            )


def _run_sim(fn: Callable[..., Any], hub: SimHub, timeout: float, args: tuple[Any, ...], *, distributed: bool) -> list[Any]:
    if not distributed:
        return _run_threads(fn, hub, timeout, args, lambda rank: None, lambda text: None)
    import torch.distributed as dist

    from torchmoe.testing.sim_dist import DistHub, threaded_world

    dist_hub = DistHub()

    def program(ctx: RankContext, *args: Any) -> Any:
        try:
            return fn(ctx, *args)
        finally:
            if sys.exc_info()[0] is None:
                dist.destroy_process_group()

    with threaded_world(dist_hub) as init:
        return _run_threads(program, hub, timeout, args, lambda rank: init(rank, hub.world, timeout), dist_hub.fail)


def _run_threads(
    fn: Callable[..., Any],
    hub: SimHub,
    timeout: float,
    args: tuple[Any, ...],
    begin: Callable[[int], None],
    fail: Callable[[str], None],
) -> list[Any]:
    shared, start = _Shared(hub, timeout), time.monotonic()
    results: list[Any] = [None] * hub.world
    ended = [False] * hub.world

    def body(rank: int) -> None:
        reason = None
        try:
            begin(rank)
            results[rank] = fn(_SimContext(shared, rank), *args)
        except BaseException as e:
            reason = f"{type(e).__name__}: {e}"
            results[rank] = RankFailure(rank, e, reason, traceback.format_exc(), time.monotonic() - start)
            shared.barrier.abort()
            fail(f"rank {rank} has left: {reason}")
        ended[rank] = True
        hub.leave(rank, reason)

    threads = [threading.Thread(target=body, args=(r,), name=f"sim rank {r}", daemon=True) for r in range(hub.world)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(max(0.0, start + timeout - time.monotonic()))
    if not all(ended):
        late = [r for r in range(hub.world) if not ended[r]]
        hub.fail(ExchangeError(f"the run did not end within {timeout:g} s: ranks {late} were still busy"))
        fail(f"the run did not end within {timeout:g} s: ranks {late} were still busy")
        shared.barrier.abort()
        for t in threads:
            t.join(1.0 / len(threads))
    frames = sys._current_frames()
    for r, t in enumerate(threads):
        if not ended[r]:
            frame = frames.get(t.ident or 0)
            trace = "".join(traceback.format_stack(frame)) if frame is not None else ""
            results[r] = RankFailure(r, None, f"still running after {timeout:g} s", trace, timeout)
    return results


# ---- processes
class _GlooContext:
    backend = "gloo"

    def __init__(self, rank: int, world: int, timeout: float) -> None:
        self.rank, self.world, self._timeout = rank, world, timeout

    def transport(self, communicators: Sequence[Communicator], *, record: bool = False) -> Transport:
        from torchmoe.comm.c10d import C10dTransport

        t = self._timeout
        return C10dTransport.create(communicators, deadlines=Deadlines(exchange=t / 3, step=t / 2, init=t), record=record)

    def barrier(self) -> None:
        import torch.distributed as dist

        dist.barrier()


def _run_gloo(fn: Callable[..., Any], world: int, timeout: float, args: tuple[Any, ...]) -> list[Any]:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    try:
        job = pickle.dumps((fn, args))
    except Exception as e:
        raise ConfigError(
            f"backend='gloo' starts processes, so fn and args must be picklable ({e}); "
            "define fn at module level or use backend='sim'"
        ) from None
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(_preload(fn))  # heeded by the first call of this process, whose server then serves all
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    start = time.monotonic()
    stacks = tempfile.TemporaryDirectory(prefix="torchmoe-ranks-")
    pipes: list[Connection] = []
    children: list[Any] = []
    for rank in range(world):
        here, there = context.Pipe()
        child = context.Process(
            target=_child,
            args=(there, job, list(sys.path), rank, world, store.port, timeout, os.path.join(stacks.name, str(rank))),
            daemon=True,
            name=f"rank {rank}",
        )
        child.start()
        there.close()
        pipes.append(here)
        children.append(child)
    results: list[Any] = [None] * world
    open_: dict[Connection, int] = {p: r for r, p in enumerate(pipes)}
    while open_ and (left := start + timeout - time.monotonic()) > 0:
        for pipe in [p for p in wait(list(open_), left) if isinstance(p, Connection)]:
            rank = open_.pop(pipe)
            results[rank] = _collect(pipe, children[rank], rank, time.monotonic() - start)
    for rank in open_.values():
        children[rank].kill()
        results[rank] = RankFailure(rank, None, f"still running after {timeout:g} s; killed", _read(stacks.name, rank), timeout)
    for pipe in pipes:
        pipe.close()  # ranks that returned wait for this: their last sends may still be on the way
    for child in children:
        child.join(5.0)
        if child.exitcode is None:
            child.kill()
            child.join(5.0)
    stacks.cleanup()
    return results


def _preload(fn: Callable[..., Any]) -> list[str]:
    """Modules the fork server imports once, so that its children need not: what this process has that is slow to import."""
    heavy = ("torch.distributed.tensor", "torch.distributed.fsdp", "torch.distributed.checkpoint", "pytest", "hypothesis")
    names = ["torch", "torch.distributed", __name__, "torchmoe.comm.c10d"]
    names += [m for m in list(sys.modules) if m in heavy or m.startswith("torchmoe.")]
    return names if fn.__module__ == "__main__" else [*names, fn.__module__]


def _collect(pipe: Connection, child: Any, rank: int, seconds: float) -> Any:
    try:
        kind, value, text, trace = pickle.loads(pipe.recv_bytes())
    except EOFError:
        child.join(5.0)
        code = child.exitcode
        how = f"was killed by signal {-code}" if code is not None and code < 0 else f"exited with code {code}"
        return RankFailure(rank, None, f"the process {how} without a result", "", seconds)
    except Exception as e:
        return RankFailure(rank, e, f"its result cannot be unpickled: {e}", "", seconds)
    return value if kind == "ok" else RankFailure(rank, value, text, trace, seconds)


def _read(folder: str, rank: int) -> str:
    try:
        with open(os.path.join(folder, str(rank))) as f:
            return f.read()
    except OSError:
        return ""


def _child(pipe: Connection, job: bytes, path: list[str], rank: int, world: int, port: int, timeout: float, stack: str) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    file = open(stack, "w")  # noqa: SIM115 (lives as long as the process)
    faulthandler.dump_traceback_later(timeout * 0.7, file=file)  # what a rank that must be killed was doing
    torch.set_num_threads(1)  # a forked child that uses more hangs in its first matmul
    sys.path[:] = path
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    try:
        fn, args = pickle.loads(job)
        store = TCPStore("127.0.0.1", port, None, False)
        limit = datetime.timedelta(seconds=timeout)
        dist.init_process_group("gloo", rank=rank, world_size=world, store=store, timeout=limit)
        out = ("ok", fn(_GlooContext(rank, world, timeout), *args), "", "")
    except BaseException as e:
        out = ("error", e, f"{type(e).__name__}: {e}", traceback.format_exc())
    try:
        data = pickle.dumps(out)
        pickle.loads(data)
    except Exception as e:
        text = out[2] or f"the result cannot be pickled: {e}"
        data = pickle.dumps(("error", None, text, out[3]))
    with contextlib.suppress(OSError):
        pipe.send_bytes(data)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(io.UnsupportedOperation, ValueError):
            stream.flush()
    if out[0] == "ok":
        with contextlib.suppress(EOFError, OSError):
            pipe.poll(timeout)
    os._exit(0)  # communicators of a failed run would block an orderly end
