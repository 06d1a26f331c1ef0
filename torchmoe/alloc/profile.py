"""The platform profile: what the hardware at hand reaches, measured, fitted, stored as JSON, read by allocator and planner.

``python -m torchmoe profile`` (alone, or under torchrun for messages) writes it; ``--profile FILE`` puts its efficiencies in
place of the assumed ones. Every second size is kept out of the fits and only used to state their errors.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torchmoe.alloc.fit import Fit, LinkCurve, errors, fit_kernel, fit_link
from torchmoe.alloc.specs import ClusterSpec, Efficiency, load_mapping
from torchmoe.errors import ConfigError

__all__ = ["Profile", "profile"]

VERSION = 2


@dataclass(frozen=True)
class Profile:
    """Measured curves of one device kind, and of messages between its processes.

    Args:
        device, dtype: what was measured, and with which elements.
        peak: FLOP/s of the best product seen; shares are relative to it.
        kernels: "attention D" (head dimension D, by sequence length), "gemm" (by rows), "grouped_gemm" (by tokens per expert).
        links: "all_to_all N", "m2n", "p2p": seconds by bytes per rank.
        fits: errors on the shapes kept out.
        writes: False on ranks other than the first.
    """

    device: str
    dtype: str
    peak: float
    kernels: Mapping[str, Efficiency]
    links: Mapping[str, LinkCurve] = field(default_factory=dict)
    fits: tuple[Fit, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    writes: bool = True

    def rows(self) -> list[list[str]]:
        return [f.row() for f in self.fits]

    def to_dict(self) -> dict[str, Any]:
        return {
            "torchmoe_profile": VERSION,
            "device": self.device,
            "dtype": self.dtype,
            "peak": f"{self.peak!r} FLOP/s",
            "kernels": {k: [list(p) for p in e.points] for k, e in self.kernels.items()},
            "links": {
                k: {"latency": f"{c.latency!r} s", "bandwidth": f"{c.bandwidth!r} B/s", "points": [list(p) for p in c.points]}
                for k, c in self.links.items()
            },
            "fits": [vars(f) for f in self.fits],
            "environment": dict(self.environment),
        }

    def save(self, path: str | Path) -> None:
        Path(path).write_text(json.dumps(self.to_dict(), indent=1))

    @classmethod
    def load(cls, source: str | Path | Mapping[str, Any]) -> Profile:
        """Read a profile.

        Raises:
            ConfigError: unreadable, another version, or something missing or out of range.
        """
        data = load_mapping(source)
        if data.get("torchmoe_profile") != VERSION:
            raise ConfigError(
                f"{source if isinstance(source, str | Path) else 'the mapping'} is not a platform profile of version {VERSION}; "
                "write one with python -m torchmoe profile"
            )
        try:
            number = float(str(data["peak"]).split()[0])
            kernels = {str(k): Efficiency(_points(v)) for k, v in data["kernels"].items()}
            if not {"gemm", "grouped_gemm"} <= set(kernels) or not any(k.startswith("attention ") for k in kernels):
                raise ConfigError(f"the platform profile is damaged (kernels: {', '.join(kernels) or 'none'}); measure again")
            links = {
                str(k): LinkCurve(float(v["latency"].split()[0]), float(v["bandwidth"].split()[0]), _points(v["points"]))
                for k, v in data["links"].items()
            }
            fits = tuple(Fit(**f) for f in data["fits"])
            return cls(str(data["device"]), str(data["dtype"]), number, kernels, links, fits, dict(data["environment"]))
        except ConfigError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as e:
            raise ConfigError(f"the platform profile is damaged ({type(e).__name__}: {e}); measure again") from None

    def apply(self, cluster: ClusterSpec, *, head_dim: int = 128) -> ClusterSpec:
        """The cluster with measured efficiencies (attention of the nearest head dimension that was measured), and within a node
        measured bandwidth and latency.

        Raises:
            ConfigError: the profile reaches more than the cluster's GPU can: it is of another device.
        """
        if self.dtype not in cluster.gpu.peak_flops:
            raise ConfigError(f"the profile is for {self.dtype}, {cluster.gpu.name} has {', '.join(cluster.gpu.peak_flops)}")
        scale = self.peak / cluster.gpu.peak(self.dtype)
        if scale > 1:
            raise ConfigError(
                f"the profile of {self.device} reaches {self.peak / 1e12:.3g} TFLOP/s in {self.dtype}, more than the peak of "
                f"{cluster.gpu.name}; profile the planned hardware"
            )
        shares = {k: Efficiency(tuple((x, y * scale) for x, y in e.points)) for k, e in self.kernels.items()}
        nearest = min((k for k in shares if k.startswith("attention ")), key=lambda k: abs(int(k.split()[1]) - head_dim))
        gpu = replace(
            cluster.gpu,
            attention=shares[nearest],
            gemm=shares["gemm"],
            grouped_gemm=shares["grouped_gemm"],
            source=f"measured on {self.device} in {self.dtype}",
        )
        wide = [k for k in self.links if k.startswith("all_to_all")]
        if not wide or cluster.nodes > 1:
            return replace(cluster, gpu=gpu)
        curve = self.links[max(wide, key=lambda k: int(k.split()[1]))]
        return replace(cluster, gpu=gpu, intra_bandwidth=curve.bandwidth, intra_latency=curve.latency, network_efficiency=1.0)


def _points(rows: Any) -> tuple[tuple[float, float], ...]:
    return tuple((float(x), float(y)) for x, y in rows)


def _split(sizes: Mapping[float, Any]) -> tuple[list[float], list[float]]:
    """Every second size for the fit (both ends included), the others to judge it."""
    ordered = sorted(sizes)
    used = [s for i, s in enumerate(ordered) if i % 2 == 0 or i == len(ordered) - 1]
    return used, [s for s in ordered if s not in used]


def _kernel_fit(name: str, measured: Mapping[float, tuple[float, float]], peak: float) -> tuple[Efficiency, Fit]:
    """The curve through all sizes, and how the one through every second size does on the others."""
    used, kept = _split(measured)
    curve = fit_kernel({s: measured[s] for s in used}, peak=peak)
    median, p90 = errors([(curve.seconds(s, measured[s][0]), measured[s][1]) for s in kept])
    shares = curve.share.points
    text = f"{min(y for _, y in shares):.0%}-{max(y for _, y in shares):.0%} of {peak / 1e12:.3g} TFLOP/s"
    return fit_kernel(measured, peak=peak).share, Fit(name, len(used), len(kept), text, median, p90)


def _link_fit(name: str, measured: Mapping[float, float]) -> tuple[LinkCurve, Fit]:
    used, kept = _split(measured)
    curve = fit_link({s: measured[s] for s in used})
    median, p90 = errors([(curve.seconds(s), measured[s]) for s in kept])
    alone, _ = errors([(curve.affine(s), measured[s]) for s in kept])
    text = f"{curve.latency * 1e6:.0f} us + bytes / {curve.bandwidth / 1e9:.3g} GB/s (these two alone: {alone:.0%})"
    return fit_link(measured), Fit(name, len(used), len(kept), text, median, p90)


def _sizes(low: int, high: int, *, halves: bool) -> list[int]:
    """low, 2 low, 4 low ... high, and with ``halves`` one and a half times each: shapes in use are multiples of powers of two."""
    out = []
    while low < high:
        out += [low, low * 3 // 2] if halves else [low]
        low *= 2
    return [*out, high]


@dataclass(frozen=True)
class _Shapes:
    """What is measured on one kind of device; ranges are (smallest, largest)."""

    seq: tuple[int, int]
    rows: tuple[int, int]
    per_expert: tuple[int, int]
    message: tuple[int, int]
    dim: int
    width: int
    experts: int
    heads: int
    head_dims: tuple[int, ...]


_SHAPES = {
    "cpu": _Shapes((32, 1024), (16, 1024), (8, 512), (1 << 10, 1 << 22), 256, 512, 4, 2, (64, 128)),
    "cuda": _Shapes((256, 16384), (128, 8192), (64, 4096), (1 << 10, 1 << 26), 4096, 1536, 16, 16, (64, 128)),
}
_QUICK = {
    "cpu": _Shapes((32, 512), (16, 256), (8, 128), (1 << 12, 1 << 20), 256, 512, 4, 2, (64,)),
    "cuda": _Shapes((256, 4096), (128, 2048), (64, 1024), (1 << 12, 1 << 24), 4096, 1536, 16, 16, (128,)),
}


def profile(*, device: str = "auto", dtype: str = "auto", quick: bool = False, progress: bool = False) -> Profile:
    """Measure this machine. Under torchrun every rank must call it; the first returns the profile with ``writes``."""
    import torch

    from torchmoe.alloc import measure

    kind = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    if kind not in ("cpu", "cuda"):
        raise ConfigError(f"device={kind!r} must be cpu, cuda or auto")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device='cuda' and torch sees no GPU here; use device='cpu' or run on the hardware to be planned")
    names = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    chosen = dtype if dtype != "auto" else ("bf16" if kind == "cuda" else "fp32")
    if chosen not in names:
        raise ConfigError(f"dtype={dtype!r} must be one of {', '.join(names)}")
    where = torch.device(kind, int(os.environ.get("LOCAL_RANK", 0))) if kind == "cuda" else torch.device("cpu")
    t, shapes = names[chosen], (_QUICK if quick else _SHAPES)[kind]
    rounds, halves = (3, False) if quick else (8, True)

    def say(text: str) -> None:
        if progress and sys.stderr.isatty():
            print(f"\r{text:60s}", end="", file=sys.stderr, flush=True)

    links, writes = _messages(where, _sizes(*shapes.message, halves=halves), rounds, say)
    cases = [
        measure.attention(where, seq_len=s, head_dim=d, heads=shapes.heads, dtype=t)
        for d in shapes.head_dims
        for s in _sizes(*shapes.seq, halves=halves)
    ]
    cases += [measure.dense(where, rows=s, dim=2 * shapes.dim, dtype=t) for s in _sizes(*shapes.rows, halves=halves)]
    cases += [
        measure.experts(where, per_expert=s, num_experts=shapes.experts, dim=shapes.dim, width=shapes.width, dtype=t)
        for s in _sizes(*shapes.per_expert, halves=halves)
    ]
    measured = measure.timed(cases, where, rounds=rounds, seconds=0.003 if quick else 0.02, progress=say) if writes else {}
    say("")
    peak = max((f / x for table in measured.values() for f, x in table.values()), default=1.0)
    fitted = {k: _kernel_fit(k, v, peak) for k, v in measured.items()}
    return Profile(
        device=torch.cuda.get_device_name(where) if kind == "cuda" else platform.processor() or platform.machine(),
        dtype=chosen,
        peak=peak,
        kernels={k: e for k, (e, _) in fitted.items()},
        links={k: c for k, (c, _) in links.items()},
        fits=tuple(f for _, f in [*fitted.values(), *links.values()]),
        environment={"torch": torch.__version__, "python": platform.python_version(), "threads": str(torch.get_num_threads())},
        writes=writes,
    )


def _messages(where: Any, sizes: list[int], rounds: int, say: Any) -> tuple[dict[str, tuple[LinkCurve, Fit]], bool]:
    """The links between the processes of this run, and whether this is the first of them. The others leave here, so that the
    first has its node's cores to itself when it measures kernels."""
    if int(os.environ.get("WORLD_SIZE", 1)) < 2:
        return {}, True
    import torch
    import torch.distributed as dist

    from torchmoe.alloc import measure

    own = not dist.is_initialized()
    if own:
        if where.type == "cuda":
            torch.cuda.set_device(where)
        dist.init_process_group("nccl" if where.type == "cuda" else "gloo")
    say("messages")
    measured = measure.messages(where, sizes=sizes, rounds=3 * rounds)
    first = dist.get_rank() == 0
    if own:
        dist.destroy_process_group()
    return {k: _link_fit(k, v) for k, v in measured.items()}, first
