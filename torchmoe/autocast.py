"""Autocast questions that also have an answer on devices without autocast (meta)."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

__all__ = ["autocast_enabled", "without_autocast"]


def autocast_enabled(device: torch.device) -> bool:
    """Whether operations on ``device`` are cast at the moment."""
    return torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """In this context operations on ``device`` keep the dtypes of their inputs."""
    return torch.autocast(device.type, enabled=False) if torch.amp.is_autocast_available(device.type) else nullcontext()
