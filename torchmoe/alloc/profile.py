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

from torchmoe.alloc.fit import Fit, KernelCurve, LinkCurve, errors, fit_kernel, fit_link
from torchmoe.alloc.specs import ClusterSpec, Efficiency, load_mapping
from torchmoe.errors import ConfigError

__all__ = ["Profile", "profile"]

VERSION = 1
_KERNELS = ("attention", "gemm", "grouped_gemm")


@dataclass(frozen=True)
class Profile:
    """Measured curves of one device kind, and of messages between its processes.

    Args:
        device, dtype: what was measured, and with which elements.
        peak: FLOP/s of the best product seen; shares are relative to it.
        kernels: "attention" (by sequence length), "gemm" (by rows), "grouped_gemm" (by tokens per expert).
        links: "all_to_all N", "m2n", "p2p": latency and bandwidth per rank.
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
            "links": {k: {"latency": f"{c.latency!r} s", "bandwidth": f"{c.bandwidth!r} B/s"} for k, c in self.links.items()},
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
            kernels = {k: Efficiency(tuple((float(x), float(y)) for x, y in data["kernels"][k])) for k in _KERNELS}
            links = {
                k: LinkCurve(float(v["latency"].split()[0]), float(v["bandwidth"].split()[0])) for k, v in data["links"].items()
            }
            fits = tuple(Fit(**f) for f in data["fits"])
            return cls(str(data["device"]), str(data["dtype"]), number, kernels, links, fits, dict(data["environment"]))
        except ConfigError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as e:
            raise ConfigError(f"the platform profile is damaged ({type(e).__name__}: {e}); measure again") from None

    def apply(self, cluster: ClusterSpec) -> ClusterSpec:
        """The cluster with measured efficiencies, and within a node measured bandwidth and latency.

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
        gpu = replace(
            cluster.gpu,
            attention=shares["attention"],
            gemm=shares["gemm"],
            grouped_gemm=shares["grouped_gemm"],
            source=f"measured on {self.device} in {self.dtype}",
        )
        wide = [k for k in self.links if k.startswith("all_to_all")]
        if not wide or cluster.nodes > 1:
            return replace(cluster, gpu=gpu)
        curve = self.links[max(wide, key=lambda k: int(k.split()[1]))]
        return replace(cluster, gpu=gpu, intra_bandwidth=curve.bandwidth, intra_latency=curve.latency, network_efficiency=1.0)


def _kernel_fit(name: str, measured: Mapping[float, tuple[float, float]], peak: float) -> tuple[Efficiency, Fit]:
    """Fit on every second size (both ends included), judge on the others, then use all of them."""
    sizes = sorted(measured)
    used = {s: measured[s] for i, s in enumerate(sizes) if i % 2 == 0 or i == len(sizes) - 1}
    kept = [s for s in sizes if s not in used]
    curve: KernelCurve = fit_kernel(used, peak=peak)
    median, p90 = errors([(curve.seconds(s, measured[s][0]), measured[s][1]) for s in kept])
    shares = curve.share.points
    text = f"{min(y for _, y in shares):.0%}-{max(y for _, y in shares):.0%} of {peak / 1e12:.3g} TFLOP/s"
    return fit_kernel(measured, peak=peak).share, Fit(name, len(used), len(kept), text, median, p90)


def _link_fit(name: str, measured: Mapping[int, float]) -> tuple[LinkCurve, Fit]:
    sizes = sorted(measured)
    used = {float(s): measured[s] for i, s in enumerate(sizes) if i % 2 == 0 or i == len(sizes) - 1}
    kept = [s for s in sizes if s not in used]
    curve = fit_link(used)
    median, p90 = errors([(curve.seconds(s), measured[s]) for s in kept])
    text = f"{curve.latency * 1e6:.0f} us + bytes / {curve.bandwidth / 1e9:.3g} GB/s"
    return fit_link({float(s): t for s, t in measured.items()}), Fit(name, len(used), len(kept), text, median, p90)


def profile(*, device: str = "auto", dtype: str = "auto", quick: bool = False, progress: bool = False) -> Profile:
    """Measure this machine. Under torchrun every rank must call it; the first returns the profile with ``writes``."""
    import torch

    from torchmoe.alloc import measure

    kind = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    if kind not in ("cpu", "cuda"):
        raise ConfigError(f"device={kind!r} must be cpu, cuda or auto")
    local = int(os.environ.get("LOCAL_RANK", 0))
    where = torch.device(kind, local) if kind == "cuda" else torch.device("cpu")
    names = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    chosen = dtype if dtype != "auto" else ("bf16" if kind == "cuda" else "fp32")
    if chosen not in names:
        raise ConfigError(f"dtype={dtype!r} must be one of {', '.join(names)}")
    t = names[chosen]
    big = kind == "cuda"
    timer = measure.Timer(where, seconds=0.05 if quick else 0.3, least=3 if quick else 7)

    def say(text: str) -> None:
        if progress and sys.stderr.isatty():
            print(f"\r{text:60s}", end="", file=sys.stderr, flush=True)

    top = {"seq": 16384 if big else 1024, "rows": 8192 if big else 1024, "per": 8192 if big else 512}
    dim, width, experts = (4096, 1536, 16) if big else (256, 512, 4)
    heads, head_dim = (16, 128) if big else (2, 64)
    if quick:
        top = {k: v // 4 for k, v in top.items()}
    steps = 5 if quick else 7

    def sizes(most: int) -> list[int]:
        return [max(1, most >> (steps - 1 - i)) for i in range(steps)]

    measured: dict[str, dict[float, tuple[float, float]]] = {k: {} for k in _KERNELS}
    for s in sizes(top["seq"]):
        say(f"attention, {s} tokens")
        measured["attention"][s] = measure.attention(timer, seq_len=s, head_dim=head_dim, heads=heads, dtype=t)
    for s in sizes(top["rows"]):
        say(f"dense product, {s} rows")
        measured["gemm"][s] = measure.dense(timer, rows=s, dim=dim * 2, dtype=t)
    for s in sizes(top["per"]):
        say(f"experts, {s} tokens per expert")
        measured["grouped_gemm"][s] = measure.experts(timer, per_expert=s, num_experts=experts, dim=dim, width=width, dtype=t)
    peak = max(f / x for table in measured.values() for f, x in table.values())
    fitted = {k: _kernel_fit(k, v, peak) for k, v in measured.items()}
    links, writes = _messages(timer, quick, say, kind)
    say("")
    return Profile(
        device=torch.cuda.get_device_name(where) if big else platform.processor() or platform.machine(),
        dtype=chosen,
        peak=peak,
        kernels={k: e for k, (e, _) in fitted.items()},
        links={k: c for k, (c, _) in links.items()},
        fits=tuple(f for _, f in [*fitted.values(), *links.values()]),
        environment={"torch": torch.__version__, "python": platform.python_version(), "threads": str(torch.get_num_threads())},
        writes=writes,
    )


def _messages(timer: Any, quick: bool, say: Any, kind: str) -> tuple[dict[str, tuple[LinkCurve, Fit]], bool]:
    if int(os.environ.get("WORLD_SIZE", 1)) < 2:
        return {}, True
    import torch
    import torch.distributed as dist

    from torchmoe.alloc import measure

    own = not dist.is_initialized()
    if own:
        if kind == "cuda":
            torch.cuda.set_device(timer.device)
        dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    say("messages")
    top = 1 << (26 if kind == "cuda" else 22)
    measured = measure.messages(timer, sizes=[top >> (2 * i) for i in range(5 if quick else 7)])
    first = dist.get_rank() == 0
    if own:
        dist.destroy_process_group()
    return {k: _link_fit(k, v) for k, v in measured.items()}, first
