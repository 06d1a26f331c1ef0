"""The example of the documentation: it fits on a page and it learns."""

from __future__ import annotations

import math
import runpy
from pathlib import Path
from typing import Any

import torch

from torchmoe.testing.ranks import run_ranks

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_loop.py"


def program(ctx: Any) -> Any:
    torch.manual_seed(0)
    return runpy.run_path(str(EXAMPLE))["train"](steps=20)


def test_own_loop_learns_on_two_attention_ranks_and_one_expert_rank() -> None:
    first, second, experts = run_ranks(program, 3, backend="gloo", timeout=120)
    assert first == second and experts == []  # one loss for the whole batch
    assert abs(first[0] - math.log(256)) < 0.6  # an untrained model knows nothing
    assert first[-1] < first[0] - 2.0


def test_own_loop_fits_on_a_page() -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 80
