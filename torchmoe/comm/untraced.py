"""Imported only while torch.compile traces: ``torch.compiler.disable`` loads torch._dynamo, which takes seconds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["call"]


@torch.compiler.disable  # type: ignore[untyped-decorator]
def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``function(*args, **kwargs)``, outside of the graph."""
    return function(*args, **kwargs)
