"""Fault injectors: a transport that misbehaves on purpose, on one message."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from torchmoe.comm.transport import P2P, Message, Transport, Work
from torchmoe.errors import ConfigError, check_whole

__all__ = ["Fault", "FaultyTransport", "Killed"]

FaultKind = Literal["late", "dead", "short", "long", "reordered", "duplicated", "corrupted", "mutated"]
_KINDS = ("late", "dead", "short", "long", "reordered", "duplicated", "corrupted", "mutated")


class Killed(RuntimeError):
    """What ends a simulated rank that is told to die."""


@dataclass(frozen=True)
class Fault:
    """What goes wrong with one send.

    Args:
        kind: ``late``: posted ``amount`` seconds late. ``dead``: the rank ends instead of sending. ``short``, ``long``:
            ``amount`` bytes too few or too many. ``reordered``: changes places with the next send to the same peer.
            ``duplicated``: sent twice. ``corrupted``: the byte at ``amount`` (negative: from the end) is inverted on the way.
            ``mutated``: that byte of the caller's buffer is inverted right after the post.
        communicator: on which communicator.
        nth: on the how manyth post with a send on it, from 0.
        amount: see above.
    """

    kind: FaultKind
    communicator: str
    nth: int = 0
    amount: float = 16

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise ConfigError(f"fault kind {self.kind!r} is unknown; use one of {', '.join(_KINDS)}")
        check_whole("nth", self.nth, 0, "it counts the posts from 0")


class FaultyTransport:
    """``transport`` with one fault. Everything else passes through.

    Args:
        transport: the transport of this rank.
        fault: what goes wrong.
        process: whether a dead rank is a process, which exits with code 17, or a thread, which raises :class:`Killed`.
    """

    def __init__(self, transport: Transport, fault: Fault, *, process: bool = False) -> None:
        self.rank, self.world_size = transport.rank, transport.world_size
        self._inner, self._fault, self._process = transport, fault, process
        self._seen = 0
        self._held: list[tuple[list[P2P], str, _Held]] = []
        self._first: list[Work] = []  # of two; gloo takes a message back whose handle is dropped

    def post(self, communicator: str, ops: Sequence[P2P], what: str) -> Work:
        sends = [op for op in ops if op.side == "send"]
        if communicator != self._fault.communicator or not sends:
            return self._inner.post(communicator, ops, what)
        hit = self._seen == self._fault.nth
        self._seen += 1
        if not hit:
            work = self._inner.post(communicator, ops, what)
            for held_ops, held_what, handle in self._held:
                handle.work = self._inner.post(communicator, held_ops, held_what)
            self._held.clear()
            return work
        return self._misbehave(communicator, list(ops), what)

    def _misbehave(self, communicator: str, ops: list[P2P], what: str) -> Work:
        kind, amount = self._fault.kind, self._fault.amount
        n = int(amount)
        if kind == "late":
            time.sleep(amount)
        elif kind == "dead":
            if self._process:
                os._exit(17)
            raise Killed(f"rank {self.rank} was killed before {what}")
        elif kind == "short":
            ops = [op._replace(buffer=op.buffer[: op.buffer.numel() - n]) if op.side == "send" else op for op in ops]
        elif kind == "long":
            ops = [op._replace(buffer=torch.cat([op.buffer, op.buffer[:n]])) if op.side == "send" else op for op in ops]
        elif kind == "reordered":
            handle = _Held()
            self._held.append((ops, what, handle))
            return handle
        elif kind == "duplicated":
            self._first.append(self._inner.post(communicator, ops, what))
        elif kind == "corrupted":
            ops = [op._replace(buffer=_invert(op.buffer.clone(), n)) if op.side == "send" else op for op in ops]
        work = self._inner.post(communicator, ops, what)
        if kind == "mutated":
            for op in ops:
                if op.side == "send":
                    _invert(op.buffer, n)
        return work

    def log(self) -> list[Message]:
        return self._inner.log()

    def close(self) -> None:
        self._inner.close()


class _Held:
    """The handle of a send that is held back."""

    def __init__(self) -> None:
        self.work: Work | None = None

    def done(self) -> bool:
        return self.work is not None and self.work.done()

    def wait(self, timeout: float) -> None:
        end = time.monotonic() + timeout
        while self.work is None and time.monotonic() < end:
            time.sleep(0.001)
        if self.work is not None:
            self.work.wait(max(0.0, end - time.monotonic()))


def _invert(buffer: torch.Tensor, at: int) -> torch.Tensor:
    buffer[at] = 255 - int(buffer[at])
    return buffer
