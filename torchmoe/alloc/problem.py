"""The allocation as tables of times, and a choice out of them: what the program solves. Knows nothing of models or clusters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

__all__ = ["Choice", "Layout", "Problem", "evaluate"]


@dataclass(frozen=True)
class Layout:
    """One number of replicas and groups, with the tables of its candidates (seconds; keys are sizes per group).

    Args:
        attention: M -> compute time of the attention side.
        ffn: N -> compute time of the FFN side.
        wire_a, wire_f: N -> time of the side's busier direction over ONE NIC.
        max_n: M -> largest N whose rows fit in the attention ranks' buffers; missing means no limit.
    """

    replicas: int
    pa: int
    pf: int
    attention: Mapping[int, float]
    ffn: Mapping[int, float]
    wire_a: Mapping[int, float]
    wire_f: Mapping[int, float]
    max_n: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Problem:
    """All layouts and the budgets.

    Args:
        gpus: GPUs for both sides together, or a pair (attention pool, FFN pool) of unequal kinds.
        nics: whole NICs that both sides may share freely (a pair for two pools); None fixes NICs to their GPUs.
        nics_per_gpu: NICs that come with a GPU when they are fixed (a pair for two pools).
    """

    layouts: Sequence[Layout]
    gpus: int | tuple[int, int]
    nics: int | tuple[int, int] | None = None
    nics_per_gpu: float | tuple[float, float] = 1.0

    def per_gpu(self, side: int) -> float:
        return self.nics_per_gpu[side] if isinstance(self.nics_per_gpu, tuple) else self.nics_per_gpu


@dataclass(frozen=True)
class Choice:
    """A solution: which layout (index), sizes, NICs per group, T, GPUs, and how far from optimal it may be."""

    layout: int
    m: int
    n: int
    qa: float
    qf: float
    time: float
    gpus: int
    gap: float = 0.0


def evaluate(problem: Problem, k: int, m: int, n: int, qa: float, qf: float) -> float:
    """T of one choice."""
    o = problem.layouts[k]
    return max(o.attention[m], o.ffn[n], o.wire_a[n] / qa, o.wire_f[n] / qf)
