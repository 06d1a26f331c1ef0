"""The one home of formulas: FLOPs, saved bytes, bytes on the wire, memory. Pure: no torch, no devices.

Exact mode: ``model``, ``flops``, ``experts``, ``traffic``, ``memory``. The published formulas as printed
("paper" mode): ``disagmoe``, ``piper``, ``moeblaze``; import those modules by name.
"""

from torchmoe.costs.experts import ExpertCosts
from torchmoe.costs.flops import LayerFlops, attention_context, forward_flops, layer_flops, model_flops, recompute_factor
from torchmoe.costs.memory import (
    FP32,
    MIXED,
    MemoryParts,
    Precision,
    attention_saved_bytes,
    expert_saved_bytes,
    live_units_1f1b,
    live_units_af,
)
from torchmoe.costs.model import ModelShape
from torchmoe.costs.traffic import LayerTraffic, copies_leaving_node, hit_probability, layer_traffic, rows_per_token

__all__ = [
    "FP32",
    "MIXED",
    "ExpertCosts",
    "LayerFlops",
    "LayerTraffic",
    "MemoryParts",
    "ModelShape",
    "Precision",
    "attention_context",
    "attention_saved_bytes",
    "copies_leaving_node",
    "expert_saved_bytes",
    "forward_flops",
    "hit_probability",
    "layer_flops",
    "layer_traffic",
    "live_units_1f1b",
    "live_units_af",
    "model_flops",
    "recompute_factor",
    "rows_per_token",
]
