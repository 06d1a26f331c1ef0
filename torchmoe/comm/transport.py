"""The seam to the wire: point-to-point messages on named communicators. Back ends: c10d here, ``sim`` in torchmoe.testing.

A transport moves bytes and knows nothing of tokens. Everything above it (headers, counts, order) is M2NExchange's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from torchmoe.errors import ConfigError
from torchmoe.placement import Communicator

__all__ = ["Message", "P2P", "SwapTransport", "Transport", "Work", "check_op", "payload"]


class P2P(NamedTuple):
    """One send or receive of one whole uint8 buffer. ``peer`` is a global rank."""

    side: Literal["send", "recv"]
    peer: int
    buffer: Tensor


class Message(NamedTuple):
    """A line of the byte log: what this rank SENT."""

    communicator: str
    source: int
    destination: int
    num_bytes: int


@runtime_checkable
class Work(Protocol):
    """Operations that were posted together."""

    def done(self) -> bool:
        """Whether all of them have ended (well or badly). Never blocks."""

    def wait(self, timeout: float) -> None:
        """Block until all have ended.

        Raises:
            ExchangeTimeout: not within ``timeout`` seconds; the communicator is unusable afterwards.
            PeerLost: a peer died or closed the connection.
        """


@runtime_checkable
class Transport(Protocol):
    """Point-to-point messages. FIFO per (communicator, source, destination), no tags; a send may wait for its receive."""

    rank: int
    world_size: int

    def post(self, communicator: str, ops: Sequence[P2P], what: str) -> Work:
        """Start all of ``ops`` (may be empty) and return. ``what`` names the operation in errors.

        A buffer belongs to the transport until the work is done.
        """

    def log(self) -> list[Message]:
        """Every message sent so far, when recording was asked for."""

    def close(self) -> None:
        """Release the communicators. Messages in flight are abandoned."""


@runtime_checkable
class SwapTransport(Transport, Protocol):
    """A transport that also has one call for a message to and from every rank of a communicator, where that is cheaper."""

    def members(self, communicator: str) -> tuple[int, ...]:
        """Global ranks of a communicator, in its order."""

    def swap(
        self,
        communicator: str,
        send: Tensor,
        send_bytes: Sequence[int],
        recv: Tensor,
        recv_bytes: Sequence[int],
        *,
        what: str,
    ) -> Work:
        """Start sending ``send``, cut by ``send_bytes``, to the communicator's ranks in order (this one's part included), and
        receiving ``recv`` likewise. All ranks of the communicator call it, in one order. Buffers are 1-D uint8."""


def payload(x: Tensor) -> Tensor:
    """``x`` as a message buffer: 1-D uint8, the same memory (fp8 included, which gloo would refuse)."""
    return x.detach().contiguous().view(-1).view(torch.uint8)


def check_op(op: P2P, rank: int, group: Communicator, what: str) -> Tensor:
    """The buffer of ``op`` on ``group``; what no back end could carry is refused. For back ends.

    Raises:
        ConfigError: the side is unknown; the peer is this rank or not in the group; the buffer is not 1-D contiguous uint8.
    """
    if op.peer == rank or op.peer not in group.ranks:
        raise ConfigError(
            f"{what}: rank {op.peer} is no peer of rank {rank} in {group.name!r} {list(group.ranks)}; "
            "send to other ranks of the communicator and copy the self-part"
        )
    if op.side not in ("send", "recv"):
        raise ConfigError(f"{what}: side {op.side!r} is unknown; use 'send' or 'recv'")
    b = op.buffer
    if b.dtype != torch.uint8 or b.dim() != 1 or not b.is_contiguous():
        raise ConfigError(
            f"{what}: a message buffer must be contiguous 1-D uint8, not {tuple(b.shape)} {b.dtype}; use transport.payload(x)"
        )
    return b
