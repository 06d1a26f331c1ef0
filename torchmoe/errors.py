"""Every error that torchmoe raises on purpose.

A message is one sentence with the value, the rule and the remedy, and it is raised before anything is launched or sent.
"""

__all__ = [
    "CheckpointError",
    "ConfigError",
    "ExchangeError",
    "ExchangeTimeout",
    "PeerLost",
    "RoutingError",
    "ScheduleError",
    "TorchMoEError",
]


class TorchMoEError(Exception):
    """Base of all errors raised by torchmoe."""


class ConfigError(TorchMoEError, ValueError):
    """A value that was passed in, or a combination of values, is refused."""


class RoutingError(TorchMoEError, ValueError):
    """Expert ids or gates break the contract of a routing (range, shape, duplicates)."""


class ScheduleError(TorchMoEError, ValueError):
    """A schedule is incomplete, out of order, or would deadlock."""


class CheckpointError(TorchMoEError, RuntimeError):
    """A checkpoint is missing, incomplete, or belongs to another model."""


class ExchangeError(TorchMoEError, RuntimeError):
    """A message between ranks was missing, had another size, or was not the one expected."""


class ExchangeTimeout(ExchangeError):
    """A message did not come within the deadline."""


class PeerLost(ExchangeError):
    """A peer process died or closed its connection. ``peer`` is its global rank where it is known."""

    peer: int | None = None
