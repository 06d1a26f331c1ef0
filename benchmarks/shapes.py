"""Shapes and routings that every expert benchmark shares."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["CPU", "MODELS", "MOEBLAZE", "ROUTINGS", "ExpertShape", "routing"]

ROUTINGS = ("balanced", "zipf", "one-hot", "half-empty")


@dataclass(frozen=True)
class ExpertShape:
    """T tokens, D model width, F expert width, E experts, K experts per token."""

    name: str
    T: int
    D: int
    F: int
    E: int
    K: int
    activation: str = "swiglu"
    bias: bool = False

    @property
    def gated(self) -> bool:
        return self.activation in ("swiglu", "geglu", "reglu", "clamped_swiglu")


MODELS = (
    ExpertShape("qwen3-30b", 32768, 2048, 768, 128, 8),
    ExpertShape("olmoe", 32768, 2048, 1024, 64, 8),
    ExpertShape("qwen3-235b", 32768, 4096, 1536, 128, 8),
    ExpertShape("sonic-7b-n256", 24576, 1536, 256, 128, 8),
    ExpertShape("gpt-oss-20b", 32768, 2880, 2880, 32, 4, "clamped_swiglu", True),
    ExpertShape("qwen3-next", 32768, 2048, 512, 512, 10),
    ExpertShape("deepseek-v3", 16384, 7168, 2048, 256, 8),
    ExpertShape("mixtral-8x7b", 16384, 4096, 14336, 8, 2),
    ExpertShape("qwen3-30b-T4096", 4096, 2048, 768, 128, 8),
    ExpertShape("sonic-30b-n256", 32768, 4096, 256, 256, 16),
    ExpertShape("scattermoe-g8", 16384, 4096, 1024, 64, 8, "gelu"),
)
CPU = (
    ExpertShape("cpu-16x2", 2048, 256, 512, 16, 2),
    ExpertShape("cpu-64x6", 4096, 128, 256, 64, 6),
    ExpertShape("cpu-8x2", 512, 512, 1024, 8, 2),
)
# Table 1 of the paper: (T, D, E, K), F = 4 D, each with SiLU and with SwiGLU.
MOEBLAZE = tuple(
    ExpertShape(f"conf{i} {activation}", T, D, 4 * D, E, K, activation)
    for activation in ("silu", "swiglu")
    for i, (T, D, E, K) in enumerate(
        [
            (65536, 512, 4, 1),
            (65536, 1024, 8, 2),
            (65536, 1024, 16, 4),
            (32768, 2048, 16, 4),
            (32768, 512, 16, 4),
            (16384, 1024, 16, 4),
            (8192, 2048, 8, 4),
        ],
        start=1,
    )
)


def routing(kind: str, T: int, E: int, K: int, *, device: torch.device | str = "cpu", seed: int = 0) -> Tensor:
    """Expert ids [T, K], no expert twice for one token.

    "balanced" is uniform at random, "zipf" draws by 1/rank, "one-hot" sends every second token to expert 0 as well, "half-empty"
    uses the first half of the experts only (at least K).
    """
    generator = torch.Generator(device=device).manual_seed(seed)
    weights = torch.ones(E, device=device)
    if kind == "zipf":
        weights = 1.0 / torch.arange(1, E + 1, device=device)
    elif kind == "half-empty":
        weights[max(K, E // 2) :] = 0.0
    # Gumbel top-k draws K experts without replacement, in proportion to the weights.
    noise = -torch.log(-torch.log(torch.rand(T, E, device=device, generator=generator).clamp(1e-9, 1 - 1e-7)))
    scores = weights.log() + noise
    if kind == "one-hot":
        scores[::2, 0] = float("inf")
    return scores.topk(K, dim=1).indices
