"""Every error that torchmoe raises on purpose.

A message is one sentence with the value, the rule and the remedy, and it is raised before anything is launched or sent.
"""

from __future__ import annotations

from numbers import Integral

__all__ = [
    "CheckpointError",
    "ConfigError",
    "ExchangeError",
    "ExchangeTimeout",
    "PeerLost",
    "RoutingError",
    "ScheduleError",
    "TorchMoEError",
    "check_whole",
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


def check_whole(name: str, value: object, least: int, remedy: str) -> None:
    """Refuse what is no whole number of at least ``least``.

    Raises:
        ConfigError: a float (also 2.0), a bool, a string, or too small.
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise ConfigError(f"{name}={value!r} must be a whole number >= {least}; {remedy}")
