"""The main job: a killed run says who died, the same command resumes it, and everything is left behind."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
STEPS = 24


def command(output: Path, text: Path) -> list[str]:
    where = ["--output", str(output), "--name", "job", "--data", str(text), "--steps", str(STEPS)]
    return [sys.executable, "-m", "torchmoe.titan.main", "--module", "tests.e2e.recipe", *where, "--checkpoint.interval", "4"]


def worker(folder: Path, rank: int) -> int | None:
    """Process id of a rank of the run in ``folder``."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            line = (path / "cmdline").read_bytes().split(b"\0")
            environment = (path / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"torchmoe.titan.worker" in line and str(folder).encode() in line and f"RANK={rank}".encode() in environment:
            return int(path.name)
    return None


def running(pid: int | None) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Start, kill rank 2 after step 6, start again."""
    root = tmp_path_factory.mktemp("main")
    text = root / "text"
    text.mkdir()
    for i in range(20):
        (text / f"{i:02d}.txt").write_text("".join(f"{i} times {k} is {i * k}, give or take\n" for k in range(60)))
    folder, environment = root / "out" / "job", {**os.environ, "OMP_NUM_THREADS": "1"}
    first = subprocess.Popen(
        command(root / "out", text), cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    history = folder / "history.jsonl"
    end = time.monotonic() + 500
    while not (history.exists() and len(history.read_text().splitlines()) >= 6):
        assert time.monotonic() < end and first.poll() is None, first.communicate()[0]
        time.sleep(0.05)
    pids = [worker(folder, rank) for rank in range(4)]
    assert all(pids), pids
    os.kill(int(pids[2] or 0), signal.SIGKILL)
    killed = time.monotonic()
    while any(running(pid) for pid in pids):
        assert time.monotonic() < killed + 60
        time.sleep(0.05)
    ended = time.monotonic() - killed
    output, _ = first.communicate(timeout=120)
    second = subprocess.run(command(root / "out", text), cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500)
    return {"first": output, "code": first.returncode, "seconds": ended, "second": second, "folder": folder, "text": text}


def test_a_killed_run_ends_soon_and_its_last_lines_name_the_dead_rank(job: dict[str, Any]) -> None:
    assert job["code"] == 1
    assert job["seconds"] < 10
    last = "\n".join(job["first"].strip().splitlines()[-6:])
    assert "rank 2 (F0, process" in last and "was killed by SIGKILL" in last
    assert "resumes from the last checkpoint" in last


def test_the_same_command_resumes_after_the_last_checkpoint(job: dict[str, Any]) -> None:
    second = job["second"]
    assert second.returncode == 0, second.stdout + second.stderr
    assert f"continuing {job['folder']}" in second.stdout
    resumed = next(line for line in second.stdout.splitlines() if line.startswith("resumed after step"))
    assert int(resumed.split()[-1]) in (4, 8)
    rows = [json.loads(line) for line in (job["folder"] / "history.jsonl").read_text().splitlines()]
    assert [r["step"] for r in rows] == list(range(1, STEPS + 1))
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert all(sum(map(sum, r["load"])) == 3 * 2 * 16 * 16 for r in rows)  # layers * K * tokens


def test_a_finished_run_leaves_everything_behind(job: dict[str, Any]) -> None:
    folder = job["folder"]
    summary = json.loads((folder / "summary.json").read_text())
    for name in ("loss.png", "experts.png", "step.png", "step.svg", "step.perfetto.json"):
        assert name in summary["pictures"] and (folder / name).stat().st_size > 1000
    assert (folder / "step.png").read_bytes()[:4] == b"\x89PNG"
    assert list((folder / "tb").rglob("events*"))
    assert (folder / "checkpoint" / f"step-{STEPS}" / ".metadata").exists()
    losses = [summary["evaluation"][k] for k in ("held_out", "experts_zeroed", "own_token_attention")]
    assert all(math.isfinite(v) for v in losses) and len(set(losses)) == 3
    assert summary["corpus"]["bytes"] == sum(p.stat().st_size for p in job["text"].iterdir()) + 18  # separators
    assert summary["steps"] == STEPS and summary["shape"]["tokens"] == 256
    out = job["second"].stdout
    assert "held-out loss" in out and "ETA" in out and "tokens/s" in out and "max / mean expert load" in out


def test_the_trace_of_a_step_has_compute_and_messages_of_every_rank(job: dict[str, Any]) -> None:
    events = json.loads((job["folder"] / "step.perfetto.json").read_text())["traceEvents"]
    for rank in range(4):
        mine = [e for e in events if e["pid"] == rank and e["ph"] != "M"]
        assert {"compute", "send", "recv", "wait"} <= {e.get("cat") for e in mine}
        assert all(e["ts"] >= 0 and e.get("dur", 0) >= 0 for e in mine)
