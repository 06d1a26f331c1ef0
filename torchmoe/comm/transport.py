"""The seam to the wire: point-to-point messages on named communicators. Back ends: c10d here, ``sim`` in torchmoe.testing.

A transport moves bytes and knows nothing of tokens. Everything above it (headers, counts, order) is M2NExchange's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol, runtime_checkable

from torch import Tensor

__all__ = ["Message", "P2P", "Transport", "Work"]


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
