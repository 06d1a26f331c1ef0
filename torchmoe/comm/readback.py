"""Small device values that the host needs later."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["Readback"]


class Readback:
    """A tensor on its way to the host since it was made.

    :meth:`read` waits for that copy alone. ``tolist()`` on the device's tensor would wait for all that was queued after it,
    and the issuing thread would lose its lead over the device.
    """

    def __init__(self, values: Tensor) -> None:
        self._values = values
        self._event: torch.cuda.Event | None = None
        if values.device.type == "cuda":
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True, device="cpu")
            self._values.copy_(values, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def read(self) -> Any:
        """The values as (nested lists of) Python numbers."""
        if self._event is not None:
            self._event.synchronize()
        return self._values.tolist()
