"""Pictures of a run: loss, tokens per expert over time, and the timeline of one step. Needs matplotlib for the PNGs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torchmoe.pipeline.trace import Event

__all__ = ["load_picture", "loss_picture", "perfetto", "timeline_picture"]

_COLORS = {
    "F": "#4c78a8",
    "B": "#f58518",
    "I": "#f58518",
    "W": "#e7ba52",
    "send": "#54a24b",
    "recv": "#b279a2",
    "wait": "#d8d8d8",
}
_NAMES = {
    "F": "forward",
    "B": "backward",
    "W": "weight gradients",
    "send": "message out",
    "recv": "message in",
    "wait": "blocked",
}


def _color(event: Event) -> str:
    if event.kind != "compute":
        return _COLORS[event.kind]
    return _COLORS[event.action.lstrip("0123456789")[0]]


def _shift(events: Sequence[Event]) -> list[Event]:
    """Times in seconds since the first event."""
    first = min(e.start for e in events)
    return [e._replace(start=e.start - first, end=e.end - first) for e in events]


def perfetto(events: Sequence[Event], path: Path) -> None:
    """Chrome trace JSON, to be opened at ui.perfetto.dev: one process a rank, one thread a lane."""
    lanes = {"compute": 0, "backward": 0, "send": 1, "recv": 2}
    out: list[dict[str, Any]] = []
    for rank, group in sorted({(e.rank, e.group) for e in events}):
        out.append({"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank} ({group})"}})
        for name, lane in (("compute", 0), ("send", 1), ("recv", 2)):
            out.append({"ph": "M", "pid": rank, "tid": lane, "name": "thread_name", "args": {"name": name}})
    for i, e in enumerate(_shift(events)):
        common = {"pid": e.rank, "tid": lanes[e.stream], "name": e.action, "cat": e.kind}
        times = {"ts": 1e6 * e.start, "dur": 1e6 * (e.end - e.start)}
        if e.kind in ("send", "recv"):  # messages overlap, which slices on one thread may not
            out.append({"ph": "b", "id": i, **common, "ts": times["ts"], "args": {"bytes": e.num_bytes}})
            out.append({"ph": "e", "id": i, **common, "ts": times["ts"] + times["dur"]})
        else:
            out.append({"ph": "X", **common, **times})
    path.write_text(json.dumps({"traceEvents": out, "displayTimeUnit": "ms"}))


def _figure(width: float, height: float, rows: int = 1) -> Any:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt.subplots(rows, 1, figsize=(width, height), constrained_layout=True, squeeze=False)


def timeline_picture(events: Sequence[Event], paths: Sequence[Path], *, title: str) -> None:
    """Compute, messages out and messages in of every rank at measured times."""
    from matplotlib.patches import Patch

    events = _shift(events)
    ranks = sorted({(e.rank, e.group) for e in events})
    figure, axes = _figure(15, 1.1 + 1.05 * len(ranks))
    axis = axes[0][0]
    lanes = {"compute": 0, "backward": 0, "send": 1, "recv": 2}
    ticks, labels = [], []
    for row, (rank, group) in enumerate(ranks):
        base = -4 * row
        for lane, name in enumerate(("compute", "out", "in")):
            ticks.append(base - lane)
            labels.append(f"rank {rank} {group}  {name}" if lane == 0 else name)
        for lane, height in ((0, 0.84), (1, 0.5), (2, 0.5)):
            mine = [e for e in events if e.rank == rank and lanes[e.stream] == lane]
            spans = [(1e3 * e.start, 1e3 * max(e.end - e.start, 1e-6)) for e in mine]
            alpha = 1.0 if lane == 0 else 0.55
            axis.broken_barh(spans, (base - lane - height / 2, height), facecolors=[_color(e) for e in mine], alpha=alpha, lw=0)
        for e in events:
            if e.rank == rank and e.kind == "compute" and e.end - e.start > 0.02 * max(x.end for x in events):
                axis.text(500 * (e.start + e.end), base, e.action, ha="center", va="center", fontsize=6, color="white")
    axis.set_yticks(ticks, labels, fontsize=7)
    axis.set_xlabel("milliseconds since the step began")
    axis.set_title(title, fontsize=10)
    axis.legend(
        handles=[Patch(color=_COLORS[k], label=name) for k, name in _NAMES.items()],
        ncols=6,
        fontsize=7,
        loc="lower center",
        bbox_to_anchor=(0.5, -0.02 - 1.1 / (1.1 + 1.05 * len(ranks))),
        frameon=False,
    )
    for path in paths:
        figure.savefig(path, dpi=130, bbox_inches="tight")
    _close(figure)


def loss_picture(history: Sequence[Mapping[str, Any]], path: Path, *, levels: Mapping[str, float]) -> None:
    """Training loss by step, with horizontal lines at ``levels`` (nats per byte)."""
    figure, axes = _figure(8, 4.5)
    axis = axes[0][0]
    axis.plot([r["step"] for r in history], [r["loss"] for r in history], color="#4c78a8", lw=1.2, label="training loss")
    for (name, level), style in zip(levels.items(), ("-", "--", ":", "-.", (0, (1, 4))), strict=False):
        axis.axhline(level, color="#555555", lw=0.9, ls=style, label=f"{name} {level:.3f}")
    axis.set_xlabel("step")
    axis.set_ylabel("nats per byte")
    axis.set_ylim(bottom=0)
    axis.legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=130)
    _close(figure)


def load_picture(history: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Share of the tokens that each expert got, by step, one panel per MoE layer; 1 is an equal share."""
    import numpy as np

    load = np.array([r["load"] for r in history], dtype=float)  # [steps, L, E]
    share = load / np.maximum(load.mean(-1, keepdims=True), 1e-9)
    layers = share.shape[1]
    figure, axes = _figure(8, 1.2 + 1.9 * layers, rows=layers)
    first, last = history[0]["step"], history[-1]["step"]
    for layer in range(layers):
        axis = axes[layer][0]
        picture = axis.imshow(
            share[:, layer].T,
            aspect="auto",
            interpolation="nearest",
            cmap="viridis",
            vmin=0,
            vmax=2,
            extent=(first - 0.5, last + 0.5, share.shape[2] - 0.5, -0.5),
        )
        axis.set_ylabel(f"layer {layer}\nexpert")
    axes[-1][0].set_xlabel("step")
    figure.colorbar(picture, ax=axes.ravel().tolist(), label="tokens / equal share")
    figure.savefig(path, dpi=130)
    _close(figure)


def _close(figure: Any) -> None:
    import matplotlib.pyplot as plt

    plt.close(figure)
