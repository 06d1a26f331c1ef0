"""A model's shape from numbers, from a torchtitan ModelSpec, or from a Hugging Face ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from torchmoe.alloc.preset_data import MODELS
from torchmoe.alloc.specs import _Spec, load_mapping
from torchmoe.costs.model import ModelShape
from torchmoe.errors import ConfigError

__all__ = ["MoESpec"]


@dataclass(frozen=True, kw_only=True)
class MoESpec(ModelShape, _Spec):
    """:class:`torchmoe.costs.ModelShape` that can be read from a file or another library's configuration."""

    @classmethod
    def load(cls, source: str | Path | Mapping[str, Any]) -> MoESpec:
        """A preset's name, a JSON or YAML file (own keys or a Hugging Face config.json), or such a mapping."""
        if isinstance(source, str) and not source.endswith((".json", ".yaml", ".yml")):
            return cls.preset(source)
        data = load_mapping(source)
        return cls.from_hf(data) if "model_type" in data else cls.from_dict(data)

    @classmethod
    def preset(cls, name: str) -> MoESpec:
        """A model by name.

        Raises:
            ConfigError: no such preset.
        """
        if name.lower() not in MODELS:
            raise ConfigError(f"no model preset {name!r}; use {', '.join(MODELS)}, or a JSON file with its sizes or config.json")
        return cls(name=name.lower(), **MODELS[name.lower()])

    @classmethod
    def from_shape(cls, shape: ModelShape) -> MoESpec:
        return cls(**{f.name: getattr(shape, f.name) for f in fields(ModelShape)})

    @classmethod
    def from_hf(cls, config: Mapping[str, Any] | str | Path) -> MoESpec:
        """A Hugging Face config of a MoE decoder (mixtral, qwen2_moe, qwen3_moe, deepseek_v2/v3, gpt_oss, olmoe).

        Raises:
            ConfigError: another model type, a dense model, or MoE and dense layers in an order that is not "dense first".
        """
        c = load_mapping(config)
        kind = str(c.get("model_type", ""))
        if kind not in _HF:
            raise ConfigError(f"model_type {kind!r} is not supported; use one of {', '.join(_HF)} or give the sizes as numbers")

        def get(*names: str, default: Any = None) -> Any:
            for n in names:
                if c.get(n) is not None:
                    return c[n]
            if default is None:
                raise ConfigError(f"the {kind} config has no {' or '.join(names)}; it is needed to size the model")
            return default

        dim = get("hidden_size")
        heads = get("num_attention_heads")
        for key, value in (("hidden_size", dim), ("num_attention_heads", heads)):
            if not isinstance(value, int) or value < 1:
                raise ConfigError(f"{key}={value!r} of the {kind} config must be a whole number of at least 1")
        experts = get("num_local_experts", "n_routed_experts", "num_experts")
        width = get("moe_intermediate_size", default=c.get("intermediate_size") or 0)
        out: dict[str, Any] = {
            "name": str(c.get("_name_or_path") or kind),
            "num_layers": get("num_hidden_layers"),
            "dim": dim,
            "num_heads": heads,
            "num_kv_heads": get("num_key_value_heads", default=heads),
            "num_experts": experts,
            "top_k": get("num_experts_per_tok"),
            "expert_dim": width,
            "vocab_size": get("vocab_size"),
            "tied_embeddings": bool(c.get("tie_word_embeddings", False)),
        }
        if kind.startswith("deepseek"):
            out |= {
                "q_lora_rank": c.get("q_lora_rank") or 0,
                "kv_lora_rank": get("kv_lora_rank"),
                "qk_nope_head_dim": get("qk_nope_head_dim"),
                "qk_rope_head_dim": get("qk_rope_head_dim"),
                "v_head_dim": get("v_head_dim"),
                "num_dense_layers": int(c.get("first_k_dense_replace") or 0),
                "dense_dim": get("intermediate_size"),
                "shared_dim": (c.get("n_shared_experts") or 0) * width,
            }
            if (c.get("moe_layer_freq") or 1) != 1:
                raise ConfigError(f"moe_layer_freq={c['moe_layer_freq']}: only models with dense layers first are described")
            return cls.from_dict(out)
        out["head_dim"] = c.get("head_dim") or dim // heads
        if kind in ("qwen2_moe", "qwen3_moe"):
            dense = sorted(c.get("mlp_only_layers") or [])
            if (c.get("decoder_sparse_step") or 1) != 1 or dense != list(range(len(dense))):
                raise ConfigError(
                    f"decoder_sparse_step={c.get('decoder_sparse_step')} mlp_only_layers={dense}: "
                    "only models with dense layers first are described"
                )
            out |= {"num_dense_layers": len(dense), "dense_dim": c.get("intermediate_size") or 0 if dense else 0}
        if kind == "qwen2_moe":
            out |= {"shared_dim": get("shared_expert_intermediate_size"), "shared_gate": True, "qkv_bias": True}
        if kind == "qwen3_moe":
            out |= {"qk_norm": True, "qkv_bias": bool(c.get("attention_bias", False))}
        if kind == "gpt_oss":
            window = int(c.get("sliding_window") or 0)
            kinds = c.get("layer_types") or ["sliding_attention", "full_attention"]
            out |= {
                "windows": tuple(window if k == "sliding_attention" else 0 for k in kinds),
                "qkv_bias": True,
                "output_bias": True,
                "attention_sinks": True,
                "router_bias": True,
                "expert_bias": True,
            }
        return cls.from_dict(out)

    @classmethod
    def from_torchtitan(cls, spec: Any) -> MoESpec:
        """A torchtitan 0.3 ``ModelSpec`` (or its ``.model`` config) of a decoder with MoE layers.

        Raises:
            ConfigError: no MoE layer, or layers that differ in more than their window.
        """
        config = getattr(spec, "model", spec)
        name = "-".join(x for x in (getattr(spec, "name", ""), getattr(spec, "flavor", "")) if x) or "torchtitan"
        layers = list(config.layers)
        moe_at = [i for i, b in enumerate(layers) if getattr(b, "moe", None) is not None]
        if not moe_at:
            raise ConfigError(f"torchtitan model {name} has no MoE layer; the planner splits attention and experts")
        if moe_at != list(range(moe_at[0], len(layers))):
            raise ConfigError(f"torchtitan model {name} mixes dense and MoE layers; only dense layers first are described")
        block = layers[moe_at[0]]
        att, moe = block.attention, block.moe
        inner = moe.routed_experts.inner_experts
        gpt_oss = type(inner).__qualname__.startswith("GptOss")
        out: dict[str, Any] = {
            "name": name,
            "num_layers": len(layers),
            "dim": config.dim,
            "num_heads": att.n_heads,
            "num_experts": moe.num_experts,
            "top_k": moe.router.top_k,
            "expert_dim": inner.hidden_dim,
            "vocab_size": config.vocab_size,
            "tied_embeddings": bool(config.enable_weight_tying),
            "router_bias": bool(moe.router.gate.bias),
            "num_dense_layers": moe_at[0],
            "dense_dim": layers[0].feed_forward.w1.out_features if moe_at[0] else 0,
        }
        if moe.shared_experts is not None:
            out["shared_dim"] = moe.shared_experts.w1.out_features
        if hasattr(att, "kv_lora_rank"):
            for key in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
                out[key] = getattr(att, key)
        else:
            qkv = att.qkv_linear
            projection = qkv.wqkv if hasattr(qkv, "wqkv") else qkv.wq
            out |= {
                "num_kv_heads": att.n_kv_heads or att.n_heads,
                "head_dim": att.head_dim or config.dim // att.n_heads,
                "qk_norm": getattr(att, "qk_norm", None) is not None,
                "qkv_bias": bool(projection.bias),
                "output_bias": bool(att.wo.bias),
            }
        if gpt_oss:
            windows = tuple(getattr(b.attention, "sliding_window_size", None) or 0 for b in layers)
            out |= {"attention_sinks": True, "expert_bias": True, "windows": windows}
        return cls(**out)


_HF = ("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3", "gpt_oss", "olmoe")
