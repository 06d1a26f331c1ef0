"""The NCCL side of the c10d transport against a fake of torch.distributed: no card here, so semantics are those torch documents.

One coalesced work per batch, ``is_completed`` queries an event, an error shows up in the query, a hung kernel needs an abort.
"""

from __future__ import annotations

import gc
import time
import warnings
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist

from torchmoe.comm import c10d
from torchmoe.comm.c10d import C10dTransport
from torchmoe.comm.m2n import Key, M2NExchange
from torchmoe.comm.route import SequenceMap
from torchmoe.comm.transport import P2P
from torchmoe.errors import ExchangeError, ExchangeTimeout, PeerLost
from torchmoe.placement import Communicator, Placement

ROWS = Communicator("rows", (0, 1, 2), False)
HOST = Communicator("counts", (0, 1, 2), True)
CUDA = torch.device("cuda")


class FakeWork:
    """What ``batch_isend_irecv`` returns on NCCL: one for the batch."""

    def __init__(self) -> None:
        self.ended, self.error = False, ""

    def is_completed(self) -> bool:
        if self.error:
            raise RuntimeError(self.error)
        return self.ended


class FakeGroup:
    def __init__(self) -> None:
        self.aborted = 0

    def abort(self) -> None:
        self.aborted += 1


class Fake:
    """The parts of torch.distributed that the transport uses."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.work, self.group, self.batches = FakeWork(), FakeGroup(), []
        monkeypatch.setattr(dist, "get_rank", lambda: 0)
        monkeypatch.setattr(dist, "get_world_size", lambda: 3)
        monkeypatch.setattr(dist, "P2POp", lambda op, tensor, peer, group: (op, peer))
        monkeypatch.setattr(dist, "batch_isend_irecv", self.batch)
        self.transport = C10dTransport({"rows": (ROWS, self.group)}, device=CUDA, record=False)

    def batch(self, ops: list[Any]) -> list[FakeWork]:
        self.batches.append(ops)
        return [self.work]

    def post(self, buffers: list[torch.Tensor]) -> Any:
        ops = [P2P("send", 1, buffers[0]), P2P("recv", 2, buffers[1])]
        return self.transport._post_nccl(ROWS, self.group, ops, "dispatch of layer 0")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    return Fake(monkeypatch)


def buffers() -> list[torch.Tensor]:
    return [torch.zeros(64, dtype=torch.uint8), torch.zeros(32, dtype=torch.uint8)]


def test_all_messages_of_a_post_are_one_batch_and_end_together(fake: Fake) -> None:
    work = fake.post(buffers())
    assert [peer for _, peer in fake.batches[0]] == [1, 2] and len(fake.batches) == 1
    assert not work.done()
    fake.work.ended = True
    assert work.done()
    work.wait(1.0)


def test_buffers_live_until_the_device_has_done_with_them(fake: Fake) -> None:
    mine = buffers()
    alive = [weakref.ref(b) for b in mine]
    work = fake.post(mine)
    mine.clear()
    gc.collect()
    assert all(ref() is not None for ref in alive)
    fake.work.ended = True
    work.wait(1.0)
    del work
    gc.collect()
    assert all(ref() is None for ref in alive)


def test_a_deadline_aborts_the_communicator_once_and_names_everything(fake: Fake) -> None:
    work = fake.post(buffers())
    start = time.monotonic()
    for _ in range(2):
        with pytest.raises(
            ExchangeTimeout, match=r"dispatch of layer 0: expected 64 B to rank 1, 32 B from rank 2 .* within 0.2 s"
        ):
            work.wait(0.2)
    assert time.monotonic() - start < 1.0 and fake.group.aborted == 1
    with pytest.raises(PeerLost, match="'rows' is unusable since an earlier error: dispatch of layer 0"):
        fake.transport.post("rows", [], "combine")


def test_an_error_of_the_device_is_named_and_aborts_too(fake: Fake) -> None:
    work = fake.post(buffers())
    fake.work.error = "NCCL error: remote process exited or there was a network error"
    assert work.done()
    with pytest.raises(ExchangeError, match="64 B to rank 1 on communicator 'rows' failed because rank 1 closed the connection"):
        work.wait(1.0)
    assert fake.group.aborted == 1


def test_nothing_to_send_starts_nothing(fake: Fake) -> None:
    work = fake.transport.post("rows", [], "dispatch")
    assert work.done() and not fake.batches
    work.wait(0.0)


@pytest.mark.parametrize(("communicator", "device", "made"), [(ROWS, CUDA, 1), (HOST, CUDA, 0), (ROWS, torch.device("cpu"), 0)])
def test_nccl_communicators_are_made_at_start_up_by_all_ranks(
    communicator: Communicator, device: torch.device, made: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Made at the first message they would hang: only some ranks have one."""
    calls = []
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, group: calls.append(group))
    monkeypatch.setattr(torch, "zeros", lambda *size, **kw: None)
    c10d.connect(communicator, FakeGroup(), device)
    assert len(calls) == made


class Posts:
    """A transport that keeps what it is asked to post."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size, self.ops = rank, world_size, []

    def post(self, communicator: str, ops: Any, what: str) -> Any:
        self.ops += [(communicator, op) for op in ops]
        return FakeWork()

    def log(self) -> list[Any]:
        return []

    def close(self) -> None:
        return None


def test_ids_and_labels_travel_through_host_memory_and_rows_do_not() -> None:
    """Their communicators are gloo's also beside NCCL. A meta device stands for the card."""
    pl = Placement(attention=[1, 1], ffn=[1, 1], num_layers=2, num_experts=2)
    posts = Posts(0, 4)
    ex = M2NExchange(pl, posts, dim=4, top_k=1, device="meta")  # type: ignore[arg-type]
    seqs, key = SequenceMap(pl, (2,)), Key(0, 0)
    pendings = [
        ex.send_ids(key, torch.zeros(2, 1, dtype=torch.long), seqs),
        ex.post_ids(Key(1, 0), seqs),
        ex.send_residual(key, torch.zeros(2, 4, device="meta"), seqs),
        ex.post_residual(Key(1, 0), seqs),
    ]
    host = {c.name: c.host for c in pl.communicators("direct")}
    assert len(posts.ops) == 4 and {host[name] for name, _ in posts.ops} == {True, False}
    for name, op in posts.ops:
        assert op.buffer.device.type == ("cpu" if host[name] else "meta"), name
    with pytest.raises(ExchangeError, match=r"res.* is on cpu, the exchange's rows live on meta"):
        ex.send_residual(key, torch.zeros(2, 4), seqs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        pendings.clear()
