"""The smallest example learns."""

from __future__ import annotations

import runpy
from pathlib import Path


def test_single_device_example_learns() -> None:
    losses = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "single_device.py"))["train"]()
    assert losses[-1] < 0.6 * losses[0]
