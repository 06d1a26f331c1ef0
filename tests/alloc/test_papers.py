"""The published tables recomputed: no verdict has changed, and a changed one is noticed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.papers.__main__ import collect
from benchmarks.papers.record import Check

pytest.importorskip("mip", reason="the allocator's solver")


def test_no_verdict_has_changed() -> None:
    """What is computed in closed form; simulated figures follow the schedules and are judged by the benchmark itself."""
    found = collect(quick=True)
    assert [(c.item, c.verdict, c.expected) for c in found if c.verdict != c.expected] == []
    assert {c.paper for c in found} == {"DisagMoE", "Piper", "MoEBlaze"}
    assert sum(c.verdict in ("equal", "close") for c in found) > 50


def test_the_published_optimum_comes_from_the_program() -> None:
    """16:10 at 16K with both gains: within 5 % when NICs stay with their GPUs."""
    found = {c.item: c for c in collect(quick=True)}
    for item in ("best A:F", "gain over Megatron", "gain over 16:16"):
        c = found[f"Fig 12, 16K: {item}, NICs fixed"]
        assert c.deviation is not None and abs(c.deviation) < 0.05


def test_verdicts_follow_the_numbers() -> None:
    c = Check(paper="x", item="y", published=10.0, computed=10.05, expected="equal")
    assert c.verdict == "equal" and "CHANGED" not in c.row()[6]
    for value, verdict in ((11.0, "close"), (8.0, "differs"), (None, "not computable"), ("text", "differs")):
        other = replace(c, computed=value)
        assert other.verdict == verdict and "CHANGED (was equal)" in other.row()[6]
    band = Check(paper="x", item="y", published=(1.0, 2.0), computed=1.5, expected="equal")
    assert band.deviation == 0 and band.verdict == "equal"
    assert replace(band, computed=2.2).deviation == pytest.approx(0.1)
    assert replace(band, published="same", computed="same").verdict == "equal"
