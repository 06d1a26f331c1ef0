"""What a finished run leaves: summary.json, pictures, and a closing table."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from torchmoe.pipeline.trace import Event
from torchmoe.titan.output import SUMMARY

__all__ = ["closing_table", "colocated_bytes", "direction_bytes", "summarise", "write_pictures"]

_DIRECTIONS = {
    "dispatch": "A -> F, forward",
    "counts": "A -> F, forward",
    "combine": "F -> A, forward",
    "d_combine": "A -> F, backward",
    "d_dispatch": "F -> A, backward",
    "ids": "A -> A, forward",
    "residual": "A -> A, forward",
    "d_residual": "A -> A, backward",
}


def direction_bytes(events: Sequence[Event]) -> dict[str, int]:
    """Bytes sent per direction in a traced step, over all ranks."""
    out: dict[str, int] = {}
    for e in events:
        if e.kind == "send":
            direction = _DIRECTIONS[e.action.partition(":")[2]]
            out[direction] = out.get(direction, 0) + e.num_bytes
    return out


def colocated_bytes(load_LE: Sequence[Sequence[float]], *, dim: int, itemsize: int, ranks: int) -> int:
    """Bytes per direction that expert parallelism over all ``ranks`` would send: one row per slot, without deduplication.

    Tokens and experts are spread evenly over the ranks and a slot's expert is local with probability 1 / ranks, so a share
    (ranks - 1) / ranks of the slots travels; the sum over layers of the slots is counted from the run.
    """
    slots = sum(sum(row) for row in load_LE)
    return round(slots * (ranks - 1) / ranks * dim * itemsize)


def summarise(
    history: Sequence[Mapping[str, Any]],
    events: Sequence[Event],
    evaluation: Mapping[str, float],
    *,
    corpus: Mapping[str, Any],
    shape: Mapping[str, Any],
    run: Mapping[str, Any],
) -> dict[str, Any]:
    """Everything that is printed or drawn, as one dictionary.

    Args:
        history: rows of ``history.jsonl``.
        events: one traced step, all ranks.
        evaluation: held-out losses by name.
        corpus: name, bytes, sha256, entropies.
        shape: model and layout: dim, itemsize, ranks, tokens of a step, parameters.
        run: the options of the run.
    """
    settled = [r["seconds"] for r in history[len(history) // 10 :]] or [r["seconds"] for r in history]
    step = median(settled)
    last = history[-1]["load"]
    imbalance = max(max(row) / (sum(row) / len(row)) for row in last if sum(row))
    sent = direction_bytes(events)
    base = colocated_bytes(last, dim=shape["dim"], itemsize=shape["itemsize"], ranks=shape["ranks"])
    return {
        "run": dict(run),
        "steps": history[-1]["step"],
        "training_loss": history[-1]["loss"],
        "evaluation": dict(evaluation),
        "corpus": dict(corpus),
        "shape": dict(shape),
        "step_seconds": step,
        "tokens_per_second": shape["tokens"] / step,
        "training_seconds": sum(r["seconds"] for r in history),
        "bytes_per_step": sent,
        "colocated_bytes_per_direction": base,
        "max_over_mean_expert_load": imbalance,
    }


def closing_table(s: Mapping[str, Any]) -> str:
    """The summary for a person."""
    e, c = s["evaluation"], s["corpus"]
    own = e["own_token_attention"]
    base = s["colocated_bytes_per_direction"]

    def mib(n: float) -> str:
        return f"{n / 2**20:8.2f} MiB"

    lines = [
        f"held-out loss                         {e['held_out']:.4f} nats per byte",
        f"  entropy of its bytes, unigram       {c['unigram']:.4f}   ({c['unigram'] - e['held_out']:+.3f})",
        f"  entropy of its bytes, bigram        {c['bigram']:.4f}   ({c['bigram'] - e['held_out']:+.3f})",
        f"  same weights, routed experts zero   {e['experts_zeroed']:.4f}   ({e['experts_zeroed'] - e['held_out']:+.3f})",
        f"  same weights, attention to oneself  {own:.4f}   ({own - e['held_out']:+.3f})",
        f"step time (median)                    {1e3 * s['step_seconds']:.0f} ms",
        f"tokens per second                     {s['tokens_per_second']:,.0f}",
        f"max / mean expert load, last step     {s['max_over_mean_expert_load']:.2f}",
        f"bytes per step, by direction          sent here      colocated on {s['shape']['ranks']} ranks, rows alone",
    ]
    for direction, n in sorted(s["bytes_per_step"].items()):
        peer = mib(base) if "A -> A" not in direction else "       -"
        lines.append(f"  {direction:36}{mib(n)}   {peer}")
    return "\n".join(lines)


def write_pictures(
    folder: Path, summary: Mapping[str, Any], history: Sequence[Mapping[str, Any]], events: Sequence[Event]
) -> list[str]:
    """Draw what can be drawn; without matplotlib only the Perfetto trace, without events no timeline. Returns the names."""
    from torchmoe.titan import pictures

    names = []
    if events:
        pictures.perfetto(events, folder / "step.perfetto.json")
        names.append("step.perfetto.json")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return names
    c, e = summary["corpus"], summary["evaluation"]
    levels = {
        "held-out loss": e["held_out"],
        "unigram entropy": c["unigram"],
        "bigram entropy": c["bigram"],
        "experts zero": e["experts_zeroed"],
        "attention to oneself": e["own_token_attention"],
    }
    pictures.loss_picture(history, folder / "loss.png", levels=levels)
    pictures.load_picture(history, folder / "experts.png")
    if not events:
        return [*names, "loss.png", "experts.png"]
    title = f"step {summary['steps']} of {summary['run']['config']}: measured, one lane for compute and two for messages"
    pictures.timeline_picture(events, [folder / "step.png", folder / "step.svg"], title=title)
    return [*names, "loss.png", "experts.png", "step.png", "step.svg"]


def write_summary(folder: Path, summary: Mapping[str, Any]) -> None:
    """Last of all: a folder with a summary is a finished run."""
    (folder / SUMMARY).write_text(json.dumps(summary, indent=1))
