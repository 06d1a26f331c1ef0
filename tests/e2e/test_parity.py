"""Every layout equals one process: gradients in fp64, losses in fp32, bytes and messages as predicted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from torchmoe.titan.parity import GRADIENTS, LAYOUTS, LOSSES

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, object]]:
    """One run of all layouts, with fewer steps than ``make parity``, in a process with a fork server of its own."""
    path = tmp_path_factory.mktemp("parity") / "results.json"
    command = [sys.executable, "-m", "torchmoe.titan.parity", "--steps", "3", "--json", str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert path.exists(), done.stdout + done.stderr
    return {r["name"]: r for r in json.loads(path.read_text())}


@pytest.mark.parametrize("name", [la.name for la in LAYOUTS])
def test_a_layout_equals_one_process(results: dict[str, dict[str, object]], name: str) -> None:
    r = results[name]
    assert r["gradients"] <= GRADIENTS
    assert r["norm"] <= GRADIENTS
    assert r["replayed"] <= LOSSES
    if name != "torchtitan EP=2":
        compared, different = r["wire"]
        assert compared > 0 and different == 0
    assert r["passed"]
