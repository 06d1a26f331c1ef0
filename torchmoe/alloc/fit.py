"""Curves through measurements: an efficiency table for kernels, latency and bandwidth for messages; errors on shapes kept out."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torchmoe.alloc.specs import Efficiency
from torchmoe.errors import ConfigError

__all__ = ["Fit", "KernelCurve", "LinkCurve", "errors", "fit_kernel", "fit_link"]


@dataclass(frozen=True)
class KernelCurve:
    """Seconds of a kernel from its FLOPs: ``flops / (peak x share(size))``."""

    peak: float
    share: Efficiency

    def seconds(self, size: float, flops: float) -> float:
        return flops / (self.peak * self.share(size))


@dataclass(frozen=True)
class LinkCurve:
    """Seconds of a message: ``latency + bytes / bandwidth``."""

    latency: float
    bandwidth: float

    def seconds(self, num_bytes: float) -> float:
        return self.latency + num_bytes / self.bandwidth


def fit_kernel(measured: Mapping[float, tuple[float, float]], *, peak: float) -> KernelCurve:
    """The table through size -> (FLOPs, seconds). ``peak`` must be at least every measured rate."""
    if not measured:
        raise ConfigError("a kernel curve needs at least one measurement")
    points = []
    for size, (flops, seconds) in sorted(measured.items()):
        share = flops / seconds / peak
        if not 0 < share <= 1 + 1e-9:
            raise ConfigError(
                f"{flops / seconds:.3g} FLOP/s at size {size:g} is not within the peak of {peak:.3g}; raise the peak"
            )
        points.append((size, min(1.0, share)))
    return KernelCurve(peak, Efficiency(tuple(points)))


def fit_link(measured: Mapping[float, float]) -> LinkCurve:
    """Latency and bandwidth that minimise relative squared errors over bytes -> seconds (at least two sizes)."""
    if len(measured) < 2:
        raise ConfigError(f"{len(measured)} message sizes measured; latency and bandwidth need at least two")
    # weighted least squares of t = a + b x with weights 1 / t^2
    s = [0.0] * 5
    for x, t in measured.items():
        w = 1 / (t * t)
        for i, v in enumerate((w, w * x, w * x * x, w * t, w * x * t)):
            s[i] += v
    det = s[0] * s[2] - s[1] * s[1]
    b = (s[0] * s[4] - s[1] * s[3]) / det
    a = (s[3] - b * s[1]) / s[0]
    if b <= 0 or a < 0:  # all latency, or all bandwidth
        small, large = min(measured), max(measured)
        if b <= 0:
            return LinkCurve(statistics.median(measured.values()), math.inf)
        rate = statistics.median(t / x for x, t in measured.items() if x > 0)
        return LinkCurve(0.0, 1 / rate) if large > small else LinkCurve(measured[small], math.inf)
    return LinkCurve(a, 1 / b)


@dataclass(frozen=True)
class Fit:
    """How one curve does on shapes that it did not see."""

    name: str
    shapes: int
    held_out: int
    text: str
    median: float
    p90: float

    def row(self) -> list[str]:
        return [self.name, f"{self.shapes} + {self.held_out}", self.text, f"{self.median:.1%}", f"{self.p90:.1%}"]


def errors(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(median, 90th percentile) of the relative errors of (predicted, measured)."""
    found = sorted(abs(p - m) / m for p, m in pairs)
    if not found:
        raise ConfigError("no shape was kept out of the fit")
    return statistics.median(found), found[min(len(found) - 1, math.ceil(0.9 * len(found)) - 1)]
