"""MoEBlaze's arithmetic (arXiv 2601.05296): bytes of one MoE layer's saved tensors and index lists. The "paper" mode."""

from __future__ import annotations

from typing import Literal

from torchmoe.errors import ConfigError

__all__ = ["index_bytes", "intermediate_bytes", "routed_bytes", "saved_bytes"]

SavedSet = Literal["preactivations", "listing", "inferred"]


def routed_bytes(*, tokens: int, dim: int, top_k: int, itemsize: int = 2) -> int:
    """L k d elements: the routed-token buffer that a gathering implementation keeps."""
    return tokens * top_k * dim * itemsize


def intermediate_bytes(*, tokens: int, expert_dim: int, itemsize: int = 2) -> int:
    """L h elements: one FFN intermediate per token (the paper's "about 98 GB" example has k = 1 here)."""
    return tokens * expert_dim * itemsize


def index_bytes(*, tokens: int, num_experts: int, top_k: int) -> int:
    """Three lists of L k and E + 1 offsets, int32."""
    return 4 * (3 * tokens * top_k + num_experts + 1)


def saved_bytes(
    *, tokens: int, dim: int, expert_dim: int, top_k: int, glu: bool, itemsize: int, kept: SavedSet = "listing"
) -> int:
    """Bytes kept for backward: x and "listing" = {A, B, Y} of Algorithm 1 (SiLU: {A, Y}) or "preactivations" = {A, B} ({A}).

    "inferred" is not in the paper: {A, B} and two routed copies of x, the set which in fp32 gives the figures it reports.
    The index lists come on top (:func:`index_bytes`).
    """
    pre = 2 if glu else 1
    if kept == "inferred":
        return itemsize * tokens * top_k * (pre * expert_dim + 2 * dim)
    if kept not in ("listing", "preactivations"):
        raise ConfigError(f"kept={kept!r} is unknown; use 'listing', 'preactivations' or 'inferred'")
    return itemsize * tokens * (dim + (pre + (kept == "listing")) * top_k * expert_dim)
