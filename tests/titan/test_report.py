"""The closing table counts what the traced step sent, and what colocated expert parallelism would have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from torchmoe.pipeline.trace import Event
from torchmoe.titan.pictures import perfetto
from torchmoe.titan.report import closing_table, colocated_bytes, direction_bytes, summarise, write_pictures


def event(rank: int, action: str, kind: str, start: float, end: float, num_bytes: int = 0) -> Event:
    stream = kind if kind in ("send", "recv") else "backward" if "B" in action or "I" in action else "compute"
    return Event(rank, "A0" if rank == 0 else "F0", stream, action, kind, start, end, num_bytes=num_bytes)  # type: ignore[arg-type]


EVENTS = [
    event(0, "0F0", "compute", 5.0, 5.2),
    event(0, "0SEND_F0:counts", "send", 5.2, 5.21, 80),
    event(0, "0SEND_F0:dispatch", "send", 5.2, 5.3, 1000),
    event(1, "1WAIT_F0:dispatch", "wait", 5.1, 5.3),
    event(1, "1RECV_F0:dispatch", "recv", 5.1, 5.3, 1000),
    event(1, "1SEND_F0:combine", "send", 5.4, 5.5, 900),
    event(0, "2SEND_B0:d_combine", "send", 5.6, 5.7, 900),
    event(1, "1SEND_B0:d_dispatch", "send", 5.8, 5.9, 950),
]
HISTORY = [
    {"step": s, "loss": 3.0 / s, "grad_norm": 1.0, "tokens": 64.0, "seconds": 0.5, "load": [[32, 96], [64, 64]]}
    for s in range(1, 6)
]
SHAPE = {"dim": 8, "itemsize": 4, "ranks": 4, "tokens": 64.0}
CORPUS = {"name": "x", "unigram": 3.0, "bigram": 2.0}
LOSSES = {"held_out": 1.5, "experts_zeroed": 2.5, "own_token_attention": 2.25}


def test_bytes_are_counted_by_direction_and_only_where_they_are_sent() -> None:
    assert direction_bytes(EVENTS) == {
        "A -> F, forward": 1080,
        "F -> A, forward": 900,
        "A -> F, backward": 900,
        "F -> A, backward": 950,
    }


@pytest.mark.parametrize("ranks", [2, 4])
def test_colocated_bytes_are_what_a_random_routing_sends_on_average(ranks: int) -> None:
    """Simulated: even experts and tokens, uniform routing, one row per slot that leaves its rank."""
    generator = torch.Generator().manual_seed(0)
    tokens, experts, top_k, dim = 40_000, 8, 2, 16
    ids = torch.rand(tokens, experts, generator=generator).topk(top_k).indices
    home = torch.arange(tokens) * ranks // tokens
    away = (ids * ranks // experts != home[:, None]).sum()
    counts = torch.bincount(ids.reshape(-1), minlength=experts).tolist()
    assert colocated_bytes([counts], dim=dim, itemsize=4, ranks=ranks) == pytest.approx(int(away) * dim * 4, rel=0.01)


def summary() -> dict[str, Any]:
    return summarise(HISTORY, EVENTS, LOSSES, corpus=CORPUS, shape=SHAPE, run={"config": "cpu_2a2f"})


def test_the_summary_is_the_run() -> None:
    s = summary()
    assert (s["steps"], s["training_loss"], s["step_seconds"], s["tokens_per_second"]) == (5, 0.6, 0.5, 128.0)
    assert s["max_over_mean_expert_load"] == 1.5
    table = closing_table(s)
    assert "(+1.500)" in table and "(+1.000)" in table and "(+0.750)" in table


def test_pictures_of_a_run(tmp_path: Path) -> None:
    names = write_pictures(tmp_path, summary(), HISTORY, EVENTS)
    assert set(names) == {"step.perfetto.json", "loss.png", "experts.png", "step.png", "step.svg"}
    assert all((tmp_path / n).stat().st_size > 100 for n in names)


def test_the_perfetto_trace_has_every_event_at_its_time(tmp_path: Path) -> None:
    perfetto(EVENTS, tmp_path / "t.json")
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    spans = {e["name"]: (e["ts"], e["dur"]) for e in events if e["ph"] == "X"}
    assert spans["0F0"] == (0.0, pytest.approx(2e5))
    assert spans["1WAIT_F0:dispatch"] == (pytest.approx(1e5), pytest.approx(2e5))
    begins = {e["id"]: e for e in events if e["ph"] == "b"}
    ends = {e["id"]: e for e in events if e["ph"] == "e"}
    assert begins.keys() == ends.keys() and len(begins) == 6
    assert all(ends[i]["ts"] >= begins[i]["ts"] for i in begins)
