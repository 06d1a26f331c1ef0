"""What one expert block will keep, need for a moment, and compute, before it runs."""

from __future__ import annotations

from dataclasses import dataclass

from torchmoe.costs.experts import BLOCK_ROWS, ExpertCosts

__all__ = ["ExpertPlan", "tile_lines"]


@dataclass(frozen=True)
class ExpertPlan:
    """The plan of one forward and backward over ``tokens`` tokens, made by :meth:`FusedExpertMLP.plan`.

    Args:
        costs: the formulas of the block.
        tokens: T.
        save: the save mode, "auto" resolved.
        backend: "reference" or "triton".
        chunk_tokens: tokens of a chunk, 0 for one chunk.
        tiles: one line per kernel (Triton), or what bounds the reference's blocks.
    """

    costs: ExpertCosts
    tokens: int
    save: str
    backend: str
    chunk_tokens: int = 0
    tiles: tuple[str, ...] = ()

    @property
    def chunked(self) -> bool:
        return 0 < self.chunk_tokens < self.tokens

    @property
    def saved_bytes(self) -> int:
        """Bytes kept between forward and backward, x included."""
        return self.costs.saved_bytes(self.tokens, self.save, chunked=self.chunked)

    @property
    def forward_transient_bytes(self) -> int:
        blocked = self.backend == "reference"
        return self.costs.forward_transient_bytes(self.tokens, self.save, chunk_tokens=self.chunk_tokens, blocked=blocked)

    @property
    def backward_transient_bytes(self) -> int:
        """Without the weight gradients."""
        blocked = self.backend == "reference"
        return self.costs.backward_transient_bytes(self.tokens, self.save, chunk_tokens=self.chunk_tokens, blocked=blocked)

    @property
    def weight_gradient_bytes(self) -> int:
        """Gradients of one backward; in chunks with their fp32 accumulators."""
        return self.costs.weight_gradient_bytes(accumulate=False, chunked=self.chunked)

    def explain(self) -> str:
        """The plan as text."""
        c, T = self.costs, self.tokens
        others = [m for m in ("input", "half", "preact", "all") if m != self.save and (c.gated or m != "half")]
        per_token = self.saved_bytes / max(T, 1)
        lines = [
            f"{T} tokens, {c.num_experts} experts, top {c.top_k}, width {c.dim}, expert width {c.hidden_dim}, "
            f"{'gated' if c.gated else 'not gated'}, {c.element_size} bytes an element, {self.backend} backend",
            f"save={self.save!r}: {self.saved_bytes:,} bytes kept ({per_token:,.1f} a token); "
            + ", ".join(f"{m!r} {c.saved_bytes(T, m, chunked=self.chunked):,}" for m in others),
            f"transients: forward {self.forward_transient_bytes:,}, backward {self.backward_transient_bytes:,} bytes"
            + (f" (chunks of {self.chunk_tokens} tokens)" if self.chunked else ""),
            f"weight gradients: {self.weight_gradient_bytes:,} bytes"
            + (" (fp32 accumulators included)" if self.chunked and c.weight_size < 4 else "")
            + f"; split form: {c.weight_gradient_bytes(accumulate=True):,} in .grad, "
            f"{c.weight_work_bytes(T):,} held until WeightWork.run",
            f"FLOPs: forward {c.forward_flops(T):.4g}, backward {c.backward_flops(T, self.save):.4g}",
        ]
        return "\n".join([*lines, *self.tiles])


def tile_lines(costs: ExpertCosts, backend: str, rows: int) -> tuple[str, ...]:
    """The tiles as text: of the reference its block of rows, of Triton the preferred configuration of each grouped GEMM."""
    if backend != "triton":
        return (f"blocks: at most {BLOCK_ROWS} rows of one expert",)
    from torchmoe.kernels.tuning import KERNELS, Key, candidates, rows_bucket

    lines = []
    for kernel in KERNELS:
        bucket = rows_bucket(rows, costs.num_experts)
        choices = candidates(Key(kernel, costs.hidden_dim, costs.dim, costs.num_experts, costs.element_size, bucket))
        c = choices[0]
        lines.append(
            f"{kernel}: tile {c.block_m} x {c.block_n} x {c.block_k}, {c.num_warps} warps, {c.num_stages} stages "
            f"(first of {len(choices)} candidates; tuning or the device's memory may choose another)"
        )
    return tuple(lines)
