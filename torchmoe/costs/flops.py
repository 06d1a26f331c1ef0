"""FLOPs of a MoE decoder: multiply and add are two, matrix products only (norms, softmax and activations are left out).

A forward product of [m, k] by [k, n] costs 2mkn; its backward is two such products. Formulas: the shapes of the products
themselves, checked in the tests against torch's FlopCounterMode on torchtitan's models.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torchmoe.costs.model import ModelShape
from torchmoe.errors import ConfigError

__all__ = ["LayerFlops", "attention_context", "forward_flops", "layer_flops", "model_flops", "recompute_factor"]

Recompute = Literal["none", "full"]


def attention_context(seq_len: int, *, window: int = 0, causal: bool = True) -> float:
    """Keys that a query meets, mean over a sequence of ``seq_len`` tokens.

    Causal: (s + 1) / 2; with a window w < s: (w(w+1)/2 + (s-w) w) / s. Not causal: min(s, w or s), what a counter of dense
    products sees.
    """
    if seq_len < 1:
        raise ConfigError(f"seq_len={seq_len} must be at least 1 token")
    w = min(window, seq_len) if window else seq_len
    if not causal:
        return float(w)
    return (w * (w + 1) / 2 + (seq_len - w) * w) / seq_len


@dataclass(frozen=True)
class LayerFlops:
    """Forward FLOPs per token of one block, by part."""

    projections: float
    scores: float
    router: float
    shared: float
    dense: float
    experts: float

    @property
    def attention(self) -> float:
        """What runs on the attention side of a split layer."""
        return self.projections + self.scores + self.router + self.shared + self.dense

    @property
    def total(self) -> float:
        return self.attention + self.experts


def layer_flops(shape: ModelShape, *, layer: int, seq_len: int, causal: bool = True) -> LayerFlops:
    """Forward FLOPs per token of block ``layer`` at ``seq_len`` tokens.

    projections 2 x weights; scores 2 H (qk_dim + v_dim) x context; router 2 D E; experts 2 K x matrices x D F.
    MLA is counted in its expanded (training) form.
    """
    context = attention_context(seq_len, window=shape.window(layer), causal=causal)
    moe = layer >= shape.num_dense_layers
    ffn = 2 * shape.matrices * shape.dim
    return LayerFlops(
        projections=2 * shape.projection_params,
        scores=2 * shape.num_heads * (shape.qk_dim + shape.v_dim) * context,
        router=2 * shape.dim * shape.num_experts if moe else 0,
        shared=ffn * shape.shared_dim + (2 * shape.dim if shape.shared_gate else 0) if moe else 0,
        dense=0 if moe else ffn * shape.dense_dim,
        experts=ffn * shape.expert_dim * shape.top_k if moe else 0,
    )


def forward_flops(shape: ModelShape, *, seq_len: int, causal: bool = True) -> float:
    """Forward FLOPs per token of the whole model, head included (2 D V; the embedding is a look-up)."""
    blocks = sum(layer_flops(shape, layer=i, seq_len=seq_len, causal=causal).total for i in range(shape.num_layers))
    return blocks + 2 * shape.dim * shape.vocab_size


def model_flops(shape: ModelShape, *, seq_len: int, causal: bool = True) -> float:
    """FLOPs per trained token that MFU counts: three times the forward, recomputation not counted."""
    return 3 * forward_flops(shape, seq_len=seq_len, causal=causal)


def recompute_factor(recompute: Recompute, *, save: str = "preact", matrices: int = 3) -> float:
    """What a forward and its backward cost in units of the forward: 3, and 4 when the whole forward is repeated.

    ``save`` is the experts' mode: "input" repeats the up-projections (``matrices - 1`` of ``matrices`` products), "half" one
    of the two of a GLU; the others repeat no product. For attention leave ``save`` alone.
    """
    if recompute == "full":
        return 4.0
    return 3.0 + {"input": (matrices - 1) / matrices, "half": 1 / matrices}.get(save, 0.0)
