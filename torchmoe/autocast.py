"""Autocast questions that also have an answer for meta tensors, which have no autocast.

The device is asked for by name: torch 2.11 cannot compile ``torch.amp.is_autocast_available``.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

__all__ = ["autocast_enabled", "without_autocast"]


def autocast_enabled(device: torch.device) -> bool:
    """Whether operations on ``device`` are cast at the moment."""
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """In this context operations on ``device`` keep the dtypes of their inputs."""
    return nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)
