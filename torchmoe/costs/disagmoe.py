"""The published formulas of DisagMoE (arXiv 2605.11005), as printed: the "paper" mode. The exact mode is in flops and traffic.

Where the printed form differs from a count of the products, the docstring says by how much; nothing is corrected silently.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torchmoe.errors import ConfigError

__all__ = [
    "BalanceCase",
    "SplitTimes",
    "bubble_af",
    "bubble_base",
    "calibrate_balance",
    "colocated_time",
    "disaggregated_turning_points",
    "intensity_attention",
    "intensity_ffn",
    "split_times",
    "turning_point",
]


def intensity_attention(*, dim: int, gqa_group: float, seq_len: int, top_k: int) -> float:
    """I_attn = [H (2 + 2/g) + 4 s] / (2 k), FLOPs per byte (section 3.3; H is the hidden size here).

    The projection term is half of a FLOP count (4 + 4/g); the exact intensity is ``flops / traffic``.
    """
    return (dim * (2 + 2 / gqa_group) + 4 * seq_len) / (2 * top_k)


def intensity_ffn(*, expert_dim: int) -> float:
    """I_ffn = 2 D_e, FLOPs per byte: two matrices per expert (a GLU has three: 3 D_e)."""
    return 2.0 * expert_dim


def turning_point(*, peak_flops: float, bandwidth: float) -> float:
    """I^ = peak FLOP/s over network B/s: left of it the network binds."""
    if peak_flops <= 0 or bandwidth <= 0:
        raise ConfigError(f"peak_flops={peak_flops} and bandwidth={bandwidth} must be positive (FLOP/s and B/s)")
    return peak_flops / bandwidth


def disaggregated_turning_points(point: float, *, m: float, n: float) -> tuple[float, float]:
    """I^_A = 2m/(m+n) I^ and I^_F = 2n/(m+n) I^: m + n GPUs whose NICs are shared in equal halves by both sides."""
    if m <= 0 or n <= 0:
        raise ConfigError(f"m={m} and n={n} must be positive")
    return 2 * m / (m + n) * point, 2 * n / (m + n) * point


def bubble_base(*, pp: int, v: int, layers_per_stage: float, t_a: float, t_f: float, t_a2a: float, t_p2p: float) -> float:
    """B_base = (PP-1)/v [L (T_a + T_f + 2 T_a2a) + T_p2p]: warm-up bubble of colocated interleaved 1F1B, seconds."""
    return (pp - 1) / v * (layers_per_stage * (t_a + t_f + 2 * t_a2a) + t_p2p)


def bubble_af(*, pp: int, v: int, t_a: float, t_f: float, t_m2n: float) -> float:
    """B_AF = (PP-1)/(2v) [max(T_a, T_f) + T_M2N]: warm-up bubble of AF-Pipe, seconds."""
    return (pp - 1) / (2 * v) * (max(t_a, t_f) + t_m2n)


@dataclass(frozen=True)
class BalanceCase:
    """Times of one layer on all W GPUs (any unit), as functions of the sequence length s in units of ``base`` tokens.

    attention a(s) = a1 s + a2 s^2, FFN f(s) = f1 s, one all-to-all c(s) = c1 s.
    """

    a1: float
    a2: float
    f1: float
    c1: float

    def attention(self, s: float) -> float:
        return self.a1 * s + self.a2 * s * s

    def ffn(self, s: float) -> float:
        return self.f1 * s

    def exchange(self, s: float) -> float:
        return self.c1 * s


def calibrate_balance(shares: Mapping[float, tuple[float, float, float, float]]) -> BalanceCase:
    """Fit Figure 6a: per sequence length (attention share, FFN share, attention/comm ratio, FFN/comm ratio) in percent.

    The shares are of TIME, each side is charged one of the two all-to-alls. Units: the layer at the shorter length is 100.
    At the short length one all-to-all is the mean of the two ratios'. At the long one the growth of attention against the FFN
    fixes the quadratic part (the FFN grows linearly).
    """
    if len(shares) != 2:
        raise ConfigError(f"{len(shares)} sequence lengths given; the calibration needs two, one to scale and one for the growth")
    (s0, (a0, f0, ra, rf)), (s1, (a_long, f_long, _, _)) = sorted(shares.items())
    c0 = (a0 / ra + f0 / rf) / 2
    a_over_f = a_long / f_long * f0 * s1 / s0  # attention time at s1 on the scale of s0
    a2 = (a_over_f / s1 - a0 / s0) / (s1 - s0)
    return BalanceCase(a1=a0 / s0 - a2 * s0, a2=a2, f1=f0 / s0, c1=c0 / s0)


@dataclass(frozen=True)
class SplitTimes:
    """Attention, FFN and exchange time of a layer after the split; the stage time is their maximum."""

    attention: float
    ffn: float
    exchange: float

    @property
    def stage(self) -> float:
        return max(self.attention, self.ffn, self.exchange)


def colocated_time(case: BalanceCase, s: float) -> float:
    """a + f + 2c: nothing overlaps."""
    return case.attention(s) + case.ffn(s) + 2 * case.exchange(s)


def split_times(case: BalanceCase, s: float, *, world: int, m: float, n: float, nics_a: float, nics_f: float) -> SplitTimes:
    """T_a = a W/M, T_f = f W/N, T_m2n = c W/min(M_a, M_f) per direction, for M + N of ``world`` GPUs and their NICs."""
    if min(m, n, nics_a, nics_f) <= 0:
        raise ConfigError(f"m={m}, n={n}, nics_a={nics_a}, nics_f={nics_f} must all be positive")
    return SplitTimes(case.attention(s) * world / m, case.ffn(s) * world / n, case.exchange(s) * world / min(nics_a, nics_f))
