"""FLOPs and bytes of the expert MLP. Letters: T tokens, K slots, P = T*K rows, D model width, F expert width, E experts."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["BLOCK_ROWS", "SAVE_MODES", "ExpertCosts"]

SAVE_MODES = ("input", "half", "preact", "all")
BLOCK_ROWS = 512
_INDEX_BYTES = 4


@dataclass(frozen=True)
class ExpertCosts:
    """Costs of one expert block on one rank.

    Args:
        num_experts: E, experts on this rank.
        dim: D.
        hidden_dim: F.
        top_k: K.
        gated: gate and up projection (three weights) or one up projection (two).
        bias: b1, (b3,) b2.
        element_size: bytes of x, H, A (2 in bf16).
        gate_size: bytes of a gate (4, or 8 in fp64).
        weight_size: bytes of a weight element.
    """

    num_experts: int
    dim: int
    hidden_dim: int
    top_k: int
    gated: bool = True
    bias: bool = False
    element_size: int = 2
    gate_size: int = 4
    weight_size: int = 2

    @property
    def halves(self) -> int:
        """Pre-activations per expert unit: 2 (gate, up) or 1."""
        return 2 if self.gated else 1

    @property
    def parameters(self) -> int:
        """Elements of all weights and biases: E F D (halves + 1) + E (F halves + D)."""
        n = self.num_experts * self.hidden_dim * self.dim * (self.halves + 1)
        return n + (self.num_experts * (self.hidden_dim * self.halves + self.dim) if self.bias else 0)

    def forward_flops(self, tokens: float) -> float:
        """2 T K D F a GEMM, halves + 1 GEMMs: 6TKDF gated, 4TKDF not."""
        return 2.0 * tokens * self.top_k * self.dim * self.hidden_dim * (self.halves + 1)

    def backward_flops(self, tokens: float, save: str = "preact") -> float:
        """Twice the forward, plus what ``save`` repeats: "half" one GEMM (2TKDF), "input" the up-projections."""
        gemm = 2.0 * tokens * self.top_k * self.dim * self.hidden_dim
        repeated = {"input": self.halves, "half": 1, "preact": 0, "all": 0}[save]
        return 2.0 * self.forward_flops(tokens) + repeated * gemm

    def saved_hidden_columns(self, save: str) -> int:
        """Columns of [P, .] kept: "input" 0, "half" F, "preact" halves*F, "all" (halves+1)*F."""
        return {"input": 0, "half": 1, "preact": self.halves, "all": self.halves + 1}[save] * self.hidden_dim

    def saved_bytes(self, tokens: int, save: str = "preact", *, x: bool = True, chunked: bool = False) -> int:
        """Bytes that live between forward and backward, weights excluded: exactly what autograd holds.

        x once (T D), hidden columns (P rows), gates (T K), and int32 indices: token of each row and row of each slot (2P) and
        offsets (E + 1). In chunks only the expert of each slot (P) and the offsets are kept; the chunk queues are rebuilt.
        In bf16 gated "preact": 2D + 4KF bytes a token, plus K (8 + 4) + 4 (E + 1) / T.

        Args:
            x: whether x counts (it is the caller's tensor; with w1 and w3 frozen and H kept it is not held at all).
        """
        rows = tokens * self.top_k
        data = (tokens * self.dim if x else 0) + rows * self.saved_hidden_columns(save)
        index = (rows if chunked else 2 * rows) + self.num_experts + 1
        return data * self.element_size + rows * self.gate_size + index * _INDEX_BYTES

    def forward_transient_bytes(self, tokens: int, save: str = "preact", *, chunk_tokens: int = 0, blocked: bool = False) -> int:
        """Largest extra memory of the forward besides what is saved and the output: A [P, F] (unless saved) with Y [P, D].

        With chunks P is chunk_tokens * K. ``blocked`` (reference backend): Y and scratch blocks of ``BLOCK_ROWS`` rows,
        where A and, unless saved, H live only for a block.
        """
        rows = self._chunk(tokens, chunk_tokens) * self.top_k
        y = rows * self.dim * self.element_size
        if not blocked:
            return y + (0 if save == "all" else rows * self.hidden_dim * self.element_size)
        n = min(rows, BLOCK_ROWS)
        hidden = self.halves * self.hidden_dim
        return y + n * (2 * self.dim + hidden + self.hidden_dim) * self._wide + self._narrow_weight

    def backward_transient_bytes(self, tokens: int, save: str = "preact", *, chunk_tokens: int = 0, blocked: bool = False) -> int:
        """Largest extra memory of the backward, gradients of the weights excluded.

        dH [P, halves F] lives throughout, with A' [P, F] (until dW2) or dX~ [P, D] (after it); what ``save`` repeats is added
        while A' is made. Gates and gate gradients are [P] fp32. ``blocked``: dX~ and scratch blocks (x, dO, dX rows, H, dH,
        dA, A, the gate's activation).
        """
        rows = self._chunk(tokens, chunk_tokens) * self.top_k
        scalars = 2 * rows * max(4, self.gate_size)
        if blocked:
            n = min(rows, BLOCK_ROWS)
            block = n * (3 * self.dim + (2 * self.halves + 3) * self.hidden_dim) * self._wide
            return rows * self.dim * self.element_size + block + self._narrow_weight + scalars
        repeated = (self.halves if save == "input" else 1 if save == "half" else 0) * self.hidden_dim
        first = (self.halves + 1) * self.hidden_dim + repeated
        second = self.halves * self.hidden_dim + self.dim
        return rows * max(first, second) * self.element_size + scalars

    @property
    def _wide(self) -> int:
        """Bytes of the accumulation dtype."""
        return max(4, self.element_size)

    @property
    def _narrow_weight(self) -> int:
        """One expert's projection in the accumulation dtype, where weights are narrower."""
        return 0 if self.weight_size >= 4 else self.hidden_dim * self.dim * self._wide

    def weight_gradient_bytes(self, *, accumulate: bool, chunked: bool = False) -> int:
        """Bytes of the weight gradients: fp32 buffers where accumulated or chunked (plus their copy in the weight's dtype)."""
        wide = max(4, self.weight_size)
        if accumulate:
            return self.parameters * wide
        return self.parameters * (self.weight_size + (wide if chunked and wide != self.weight_size else 0))

    def weight_work_bytes(self, tokens: int) -> int:
        """What a deferred weight gradient (WeightWork) holds until it runs: dH, A', x, dy, gates, offsets and indices."""
        rows = tokens * self.top_k
        data = rows * (self.halves + 1) * self.hidden_dim + 2 * tokens * self.dim
        return data * self.element_size + rows * max(4, self.gate_size) + (2 * rows + self.num_experts + 1) * _INDEX_BYTES

    @staticmethod
    def _chunk(tokens: int, chunk_tokens: int) -> int:
        return min(tokens, chunk_tokens) if chunk_tokens > 0 else tokens
