"""Curves through measurements: an efficiency table for kernels, latency and bandwidth for messages; errors on shapes kept out."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torchmoe.alloc.specs import Efficiency, interpolate
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
    """Seconds of a message: (bytes, seconds) that never fall, straight lines over both logarithms; constant below the first and
    at the last rate above. Without points ``latency + bytes / bandwidth``, which is also what the planner reads.
    """

    latency: float
    bandwidth: float
    points: tuple[tuple[float, float], ...] = ()

    def affine(self, num_bytes: float) -> float:
        return self.latency + num_bytes / self.bandwidth

    def seconds(self, num_bytes: float) -> float:
        if not self.points:
            return self.affine(num_bytes)
        last, slowest = self.points[-1]
        return slowest * num_bytes / last if num_bytes > last else interpolate(self.points, num_bytes)


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
    """The curve through bytes -> seconds, with the latency and bandwidth of least relative squared error (at least two sizes)."""
    if len(measured) < 2:
        raise ConfigError(f"{len(measured)} message sizes measured; latency and bandwidth need at least two")
    for size, seconds in measured.items():
        if not (0 <= size < math.inf and 0 < seconds < math.inf):
            raise ConfigError(f"{seconds} s for {size} bytes: sizes must be 0 or more, times above 0, both finite; measure again")
    points = _rising(measured)
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
            return LinkCurve(statistics.median(measured.values()), math.inf, points)
        rate = statistics.median(t / x for x, t in measured.items() if x > 0)
        return LinkCurve(0.0, 1 / rate, points) if large > small else LinkCurve(measured[small], math.inf, points)
    return LinkCurve(a, 1 / b, points)


def _rising(measured: Mapping[float, float]) -> tuple[tuple[float, float], ...]:
    """The points, with neighbours whose times fall pooled at their geometric mean: a larger message never takes less time, and
    where the latency is all there is, this averages its noise (isotonic regression by pooling adjacent violators)."""
    pools: list[tuple[list[float], float]] = []  # sizes, mean logarithm of their seconds
    for size, seconds in sorted(measured.items()):
        sizes, mean = [size], math.log(seconds)
        while pools and pools[-1][1] > mean:
            before, other = pools.pop()
            mean = (other * len(before) + mean * len(sizes)) / (len(before) + len(sizes))
            sizes = before + sizes
        pools.append((sizes, mean))
    return tuple((size, math.exp(mean)) for sizes, mean in pools for size in sizes)


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
