"""The shape of a Mixture-of-Experts decoder as numbers, and the parameters that follow from it. Pure, without torch.

Letters: D ``dim``, F ``expert_dim``, E ``num_experts``, K ``top_k``, H ``num_heads``, V ``vocab_size``.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from torchmoe.errors import ConfigError

__all__ = ["ModelShape"]


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A decoder of ``num_layers`` blocks: the first ``num_dense_layers`` with a dense FFN, the others with a MoE.

    Args:
        num_layers: all transformer blocks, dense ones included.
        dim: width D of the residual stream.
        num_heads, num_kv_heads, head_dim: attention heads; GQA when there are fewer key/value heads than heads.
        num_experts, top_k, expert_dim: routed experts E, experts per token K, expert width F.
        vocab_size: V; 0 leaves embedding and head out (the published formulas do).
        num_dense_layers, dense_dim: leading dense blocks and their FFN width.
        shared_dim: summed width of the shared experts of a MoE layer; 0 for none.
        shared_gate: a scalar gate on the shared experts (Qwen2-MoE).
        glu: gate and up projection (three matrices per expert) instead of up only (two).
        kv_lora_rank: > 0 selects MLA, with ``q_lora_rank`` (0: full query), ``qk_nope_head_dim``, ``qk_rope_head_dim``,
            ``v_head_dim``.
        windows: sliding windows in tokens, repeated over the layers; 0 is full attention. ``(128, 0)`` is GPT-OSS.
        qk_norm, qkv_bias, output_bias, attention_sinks, router_bias, expert_bias: small parameters.
        tied_embeddings: embedding and head are one matrix.

    Raises:
        ConfigError: a size that cannot be.
    """

    name: str = "custom"
    num_layers: int
    dim: int
    num_heads: int
    num_experts: int
    top_k: int
    expert_dim: int
    num_kv_heads: int = 0
    head_dim: int = 0
    vocab_size: int = 0
    num_dense_layers: int = 0
    dense_dim: int = 0
    shared_dim: int = 0
    shared_gate: bool = False
    glu: bool = True
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0
    windows: tuple[int, ...] = (0,)
    qk_norm: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    attention_sinks: bool = False
    router_bias: bool = False
    expert_bias: bool = False
    tied_embeddings: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "windows", tuple(self.windows))
        for f in fields(self):
            value = getattr(self, f.name)
            whole = isinstance(value, int) and not isinstance(value, bool)
            if f.type == "int" and (not whole or value < 0):
                raise ConfigError(f"{f.name}={value!r} of model {self.name!r} must be a whole number of at least 0")
            if f.type == "bool" and not isinstance(value, bool):
                raise ConfigError(f"{f.name}={value!r} of model {self.name!r} must be true or false")
        if not self.num_kv_heads:
            object.__setattr__(self, "num_kv_heads", self.num_heads)
        for name in ("num_layers", "dim", "num_heads", "num_experts", "top_k", "expert_dim"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} of model {self.name!r} must be at least 1")
        if self.top_k > self.num_experts:
            raise ConfigError(f"top_k={self.top_k} is more than num_experts={self.num_experts}; a token needs distinct experts")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}; every key head serves as many"
            )
        if self.num_dense_layers >= self.num_layers:
            raise ConfigError(
                f"num_dense_layers={self.num_dense_layers} leaves no MoE layer of {self.num_layers}; give a smaller number"
            )
        if self.num_dense_layers and not self.dense_dim:
            raise ConfigError(f"num_dense_layers={self.num_dense_layers} needs dense_dim, the width of their FFN")
        if self.mla and not (self.qk_nope_head_dim and self.v_head_dim):
            raise ConfigError("kv_lora_rank > 0 (MLA) needs qk_nope_head_dim and v_head_dim; give the sizes of one head")
        if not self.mla and not self.head_dim:
            if self.dim % self.num_heads:
                raise ConfigError(f"dim={self.dim} is not a multiple of num_heads={self.num_heads}; give head_dim")
            object.__setattr__(self, "head_dim", self.dim // self.num_heads)
        if not self.windows or any(not isinstance(w, int) or w < 0 for w in self.windows):
            raise ConfigError(f"windows={list(self.windows)} must be a list of token counts, 0 for full attention")

    # ---- structure
    @property
    def mla(self) -> bool:
        """Multi-head latent attention (DeepSeek-V2/V3)."""
        return self.kv_lora_rank > 0

    @property
    def num_moe_layers(self) -> int:
        """L of the design: layers that have experts."""
        return self.num_layers - self.num_dense_layers

    @property
    def qk_dim(self) -> int:
        """Width of one query head."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim if self.mla else self.head_dim

    @property
    def v_dim(self) -> int:
        """Width of one value head."""
        return self.v_head_dim if self.mla else self.head_dim

    @property
    def matrices(self) -> int:
        """Matrices of an FFN: 3 with a gate (GLU), else 2."""
        return 3 if self.glu else 2

    def window(self, layer: int) -> int:
        """Sliding window of block ``layer`` in tokens, 0 for full attention."""
        return self.windows[layer % len(self.windows)]

    # ---- parameters, exact
    @property
    def projection_params(self) -> int:
        """Weights of the projections of one attention (what the GEMMs multiply; no biases, no norms)."""
        d, h = self.dim, self.num_heads
        if self.mla:
            q = self.q_lora_rank * (d + h * self.qk_dim) if self.q_lora_rank else d * h * self.qk_dim
            kv = d * (self.kv_lora_rank + self.qk_rope_head_dim) + self.kv_lora_rank * h * (self.qk_nope_head_dim + self.v_dim)
            return q + kv + h * self.v_dim * d
        return d * self.head_dim * (h + 2 * self.num_kv_heads) + h * self.head_dim * d

    @property
    def attention_params(self) -> int:
        """One attention with its norm (and the query/key norms, biases, sinks)."""
        n = self.projection_params + self.dim
        if self.mla:
            n += self.kv_lora_rank + self.q_lora_rank
        if self.qk_norm:
            n += 2 * self.qk_dim
        if self.qkv_bias:
            n += self.head_dim * (self.num_heads + 2 * self.num_kv_heads)
        if self.output_bias:
            n += self.dim
        if self.attention_sinks:
            n += self.num_heads
        return n

    @property
    def router_params(self) -> int:
        return self.dim * self.num_experts + (self.num_experts if self.router_bias else 0)

    @property
    def expert_params(self) -> int:
        """One routed expert."""
        bias = (self.matrices - 1) * self.expert_dim + self.dim if self.expert_bias else 0
        return self.matrices * self.dim * self.expert_dim + bias

    @property
    def shared_params(self) -> int:
        """The shared experts of one MoE layer."""
        return self.matrices * self.dim * self.shared_dim + (self.dim if self.shared_gate else 0)

    @property
    def dense_params(self) -> int:
        """The FFN of one dense layer."""
        return self.matrices * self.dim * self.dense_dim

    @property
    def embedding_params(self) -> int:
        return self.vocab_size * self.dim

    @property
    def head_params(self) -> int:
        """Final norm, and the head unless it is the embedding."""
        return self.dim + (0 if self.tied_embeddings else self.embedding_params) if self.vocab_size else 0

    @property
    def attention_side_params(self) -> int:
        """What one MoE layer keeps on its attention ranks: attention, ffn_norm, router, shared experts."""
        return self.attention_params + self.dim + self.router_params + self.shared_params

    @property
    def num_params(self) -> int:
        """All parameters of the model."""
        dense = self.num_dense_layers * (self.attention_params + self.dim + self.dense_params)
        moe = self.num_moe_layers * (self.attention_side_params + self.num_experts * self.expert_params)
        return self.embedding_params + dense + moe + self.head_params

    @property
    def active_params(self) -> int:
        """Parameters that one token meets (K experts instead of E; the embedding row is a look-up, its matrix is counted)."""
        return self.num_params - self.num_moe_layers * (self.num_experts - self.top_k) * self.expert_params
