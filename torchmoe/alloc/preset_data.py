"""Numbers of known GPUs, nodes and models. Peaks and bandwidths are the makers' figures, per direction; the achieved shares are
assumptions.

The shares (``source`` says so) stand in until ``python -m torchmoe profile`` has measured the hardware at hand. Pure data, in the
arguments of ``GPUSpec``, ``ClusterSpec`` and ``MoESpec``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["GPUS", "MODELS", "NODES"]

_ASSUMED = "assumed shares of the peak, to be replaced by a measured profile"
_GIB = 2**30
_HOPPER = {
    # causal score products of fused attention; dense and grouped products by rows and by tokens per expert
    "attention": ((1024, 0.30), (4096, 0.45), (16384, 0.55)),
    "gemm": ((128, 0.30), (1024, 0.60), (4096, 0.75)),
    "grouped_gemm": ((32, 0.05), (128, 0.20), (512, 0.40), (2048, 0.50), (8192, 0.55)),
    "source": _ASSUMED,
}
_AMPERE = {
    "attention": ((1024, 0.35), (4096, 0.50), (16384, 0.58)),
    "gemm": ((128, 0.40), (1024, 0.70), (4096, 0.80)),
    "grouped_gemm": ((32, 0.08), (128, 0.25), (512, 0.45), (2048, 0.55)),
    "source": _ASSUMED,
}
_CDNA2 = {
    # Piper's figures 3 and 4: attention 60-120 TFLOP/s, good expert shapes at least about 100, of 191.5
    "attention": ((1024, 0.31), (4096, 0.50), (16384, 0.62)),
    "gemm": ((128, 0.20), (1024, 0.50), (4096, 0.60)),
    "grouped_gemm": ((32, 0.04), (128, 0.13), (512, 0.30), (2048, 0.50), (8192, 0.55)),
    "source": "read off the ranges that Piper publishes for MI250X",
}


def _gpu(name: str, peaks: Mapping[str, float], gib: float, bandwidth: float, shares: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": name, "peak_flops": peaks, "hbm_bytes": gib * _GIB, "hbm_bandwidth": bandwidth, **shares}


_HOPPER_PEAKS = {"bf16": 989e12, "fp16": 989e12, "fp8": 1979e12, "tf32": 494e12, "fp32": 67e12}
# memory: what the driver reports as total, in whole GiB
GPUS: dict[str, dict[str, Any]] = {
    "h800": _gpu("H800", _HOPPER_PEAKS, 79, 3.35e12, _HOPPER),
    "h100": _gpu("H100", _HOPPER_PEAKS, 79, 3.35e12, _HOPPER),
    "h200": _gpu("H200", _HOPPER_PEAKS, 139, 4.8e12, _HOPPER),
    "a100": _gpu("A100-80GB", {"bf16": 312e12, "fp16": 312e12, "tf32": 156e12, "fp32": 19.5e12}, 79, 2.04e12, _AMPERE),
    "mi250x": _gpu("MI250X-GCD", {"bf16": 191.5e12, "fp16": 191.5e12, "fp32": 47.9e12}, 64, 1.6e12, _CDNA2),
    "gb200": _gpu("GB200", {"bf16": 2500e12, "fp16": 2500e12, "fp8": 5000e12, "fp32": 80e12}, 184, 8e12, _HOPPER),
}

# one node each; NVLink and fabric figures are one direction (half of the advertised sum)
NODES: dict[str, dict[str, Any]] = {
    "h800": {"gpus_per_node": 8, "nics_per_node": 8, "nic_bandwidth": 50e9, "intra_bandwidth": 200e9},
    "h100": {"gpus_per_node": 8, "nics_per_node": 8, "nic_bandwidth": 50e9, "intra_bandwidth": 450e9},
    "h200": {"gpus_per_node": 8, "nics_per_node": 8, "nic_bandwidth": 50e9, "intra_bandwidth": 450e9},
    "a100": {"gpus_per_node": 8, "nics_per_node": 8, "nic_bandwidth": 25e9, "intra_bandwidth": 300e9},
    # Frontier: 8 GCDs and 4 Slingshot NICs a node, 4 nodes behind a switch
    "mi250x": {
        "gpus_per_node": 8,
        "nics_per_node": 4,
        "nic_bandwidth": 25e9,
        "intra_bandwidth": 50e9,
        "nodes_per_switch": 4,
        "cross_switch_latency": 5e-6,
        "cross_switch_share": 0.5,
    },
    # "node" is the NVLink domain of 72
    "gb200": {"gpus_per_node": 72, "nics_per_node": 72, "nic_bandwidth": 50e9, "intra_bandwidth": 900e9},
}
NODES["frontier"] = NODES["mi250x"]
GPUS["frontier"] = GPUS["mi250x"]


_QWEN = {"vocab_size": 151936, "qk_norm": True, "head_dim": 128}
_V3_HEADS = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
_GPT_OSS = {
    "dim": 2880,
    "num_heads": 64,
    "num_kv_heads": 8,
    "head_dim": 64,
    "top_k": 4,
    "expert_dim": 2880,
    "vocab_size": 201088,
    "windows": (128, 0),
    "qkv_bias": True,
    "output_bias": True,
    "attention_sinks": True,
    "router_bias": True,
    "expert_bias": True,
}


def _xmoe(layers: int, dim: int, width: int, experts: int, k: int) -> dict[str, Any]:
    # the printed totals fit experts of two matrices; heads of 128 are assumed, embeddings are not in the table
    return {
        "num_layers": layers,
        "dim": dim,
        "num_heads": dim // 128,
        "num_experts": experts,
        "top_k": k,
        "expert_dim": width,
        "glu": False,
    }


MODELS: dict[str, dict[str, Any]] = {
    # DisagMoE's Table 2 (its DeepSeek-MoE has top-4 and no shared experts; the public model is deepseek-moe-16b)
    "deepseek-moe": {
        "num_layers": 28,
        "dim": 2048,
        "num_heads": 16,
        "num_experts": 64,
        "top_k": 4,
        "expert_dim": 1408,
        "vocab_size": 102400,
    },
    "deepseek-moe-16b": {
        "num_layers": 28,
        "dim": 2048,
        "num_heads": 16,
        "num_experts": 64,
        "top_k": 6,
        "expert_dim": 1408,
        "vocab_size": 102400,
        "num_dense_layers": 1,
        "dense_dim": 10944,
        "shared_dim": 2816,
    },
    "gpt-oss-120b": {"num_layers": 36, "num_experts": 128, **_GPT_OSS},
    "gpt-oss-20b": {"num_layers": 24, "num_experts": 32, **_GPT_OSS},
    "qwen3-235b": {
        "num_layers": 94,
        "dim": 4096,
        "num_heads": 64,
        "num_kv_heads": 4,
        "num_experts": 128,
        "top_k": 8,
        "expert_dim": 1536,
        **_QWEN,
    },
    "qwen3-30b": {
        "num_layers": 48,
        "dim": 2048,
        "num_heads": 32,
        "num_kv_heads": 4,
        "num_experts": 128,
        "top_k": 8,
        "expert_dim": 768,
        **_QWEN,
    },
    "deepseek-v3": {
        "num_layers": 61,
        "dim": 7168,
        "num_heads": 128,
        "q_lora_rank": 1536,
        **_V3_HEADS,
        "num_experts": 256,
        "top_k": 8,
        "expert_dim": 2048,
        "shared_dim": 2048,
        "num_dense_layers": 3,
        "dense_dim": 18432,
        "vocab_size": 129280,
    },
    "mixtral-8x7b": {
        "num_layers": 32,
        "dim": 4096,
        "num_heads": 32,
        "num_kv_heads": 8,
        "num_experts": 8,
        "top_k": 2,
        "expert_dim": 14336,
        "vocab_size": 32000,
    },
    "mixtral-8x22b": {
        "num_layers": 56,
        "dim": 6144,
        "num_heads": 48,
        "num_kv_heads": 8,
        "num_experts": 8,
        "top_k": 2,
        "expert_dim": 16384,
        "vocab_size": 32000,
    },
    "xmoe-small": _xmoe(28, 2048, 1408, 64, 6),
    "xmoe-medium": _xmoe(28, 5120, 1536, 128, 6),
    "xmoe-large": _xmoe(28, 7168, 2048, 256, 8),
    "xmoe-super": _xmoe(61, 7168, 2560, 256, 8),
}
