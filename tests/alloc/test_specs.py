"""Specs: round trips through JSON and YAML, units required, unknown keys refused, other libraries' configurations read."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from torchmoe.alloc.models import MoESpec
from torchmoe.alloc.presets import cluster_preset, cluster_presets, gpu_preset, model_preset, model_presets
from torchmoe.alloc.specs import ClusterSpec, Efficiency, Workload, load_mapping
from torchmoe.alloc.units import format_quantity, quantity
from torchmoe.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("80 GB", "bytes", 80e9),
        ("80GiB", "bytes", 80 * 2**30),
        ("400 Gbit/s", "bytes/s", 50e9),
        ("400 Gbps", "bytes/s", 50e9),
        ("3.35 TB/s", "bytes/s", 3.35e12),
        ("989 TFLOP/s", "flop/s", 989e12),
        ("1.5 PFLOPS", "flop/s", 1.5e15),
        ("5 us", "s", 5e-6),
        ("1e3 ns", "s", 1e-6),
        (0, "bytes", 0.0),
    ],
)
def test_units_are_read(text: object, kind: str, value: float) -> None:
    assert quantity(text, kind, name="x") == pytest.approx(value, rel=1e-15)


@pytest.mark.parametrize(
    ("text", "kind"),
    [("80", "bytes"), (80, "bytes"), ("80 GB", "bytes/s"), ("50 GB/s", "bytes"), ("5 m", "s"), ("x", "s"), (True, "s"),
     (None, "bytes"), ("-3 GB", "bytes"), ("inf s", "s"), ("400 Gbit", "bytes"), ("989 TB", "flop/s")],
)  # fmt: skip
def test_missing_and_wrong_units_are_refused_with_name_and_remedy(text: object, kind: str) -> None:
    with pytest.raises(ConfigError, match=r"hbm=.*"):
        quantity(text, kind, name="hbm")


@given(st.floats(1e-9, 1e18), st.sampled_from(["bytes", "bytes/s", "flop/s", "s"]))
@example(5.960464477539063e-08, "s")  # no scaled form is exact
def test_quantities_survive_text(value: float, kind: str) -> None:
    assert quantity(format_quantity(value, kind), kind, name="x") == value


@pytest.mark.parametrize("kind", cluster_presets())
def test_cluster_presets_survive_json_and_yaml(kind: str, tmp_path: Path) -> None:
    yaml = pytest.importorskip("yaml", reason="reads YAML")
    spec = cluster_preset(f"{kind}x144")
    assert spec.gpus == 144
    (tmp_path / "c.json").write_text(spec.to_json())
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(spec.to_dict()))
    assert ClusterSpec.load(str(tmp_path / "c.json")) == spec == ClusterSpec.load(tmp_path / "c.yaml")


@pytest.mark.parametrize("name", model_presets())
def test_model_presets_survive_json(name: str) -> None:
    spec = model_preset(name)
    assert MoESpec.from_dict(json.loads(spec.to_json())) == spec


def test_model_presets_have_their_published_sizes() -> None:
    sizes = {"gpt-oss-120b": 116.8, "qwen3-235b": 235.1, "deepseek-v3": 671.0, "mixtral-8x7b": 46.7, "mixtral-8x22b": 140.6}
    for name, billions in sizes.items():
        assert model_preset(name).num_params / 1e9 == pytest.approx(billions, rel=0.001)
    assert model_preset("qwen3-235b").active_params / 1e9 == pytest.approx(22.2, rel=0.01)


HF: dict[str, dict[str, Any]] = {
    "qwen3-30b": {
        "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32,
        "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
        "intermediate_size": 6144, "vocab_size": 151936, "mlp_only_layers": [], "decoder_sparse_step": 1,
    },
    "mixtral-8x7b": {
        "model_type": "mixtral", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 14336,
        "vocab_size": 32000,
    },
    "deepseek-v3": {
        "model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128,
        "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "intermediate_size": 18432,
        "n_shared_experts": 1, "first_k_dense_replace": 3, "vocab_size": 129280, "num_key_value_heads": 128,
    },
    "gpt-oss-120b": {
        "model_type": "gpt_oss", "hidden_size": 2880, "num_hidden_layers": 36, "num_attention_heads": 64,
        "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 128, "num_experts_per_tok": 4,
        "intermediate_size": 2880, "vocab_size": 201088, "sliding_window": 128,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", HF)
def test_hugging_face_configs_give_the_preset(name: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(HF[name]))
    assert replace(MoESpec.load(path), name=name) == model_preset(name)


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "qwen2_moe", "gpt_oss"])
def test_hugging_face_models_have_the_predicted_parameters(name: str) -> None:
    """The library's own modules on the meta device, small sizes, all defaults otherwise."""
    transformers = pytest.importorskip("transformers", reason="counts transformers' models")
    import torch

    config = transformers.AutoConfig.for_model(
        name, num_hidden_layers=2, hidden_size=64, num_attention_heads=4, num_key_value_heads=2, vocab_size=256
    )
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert MoESpec.from_hf(config.to_dict()).num_params == sum(p.numel() for p in model.parameters())


def test_what_cannot_be_described_is_refused() -> None:
    with pytest.raises(ConfigError, match="llama"):
        MoESpec.from_hf({"model_type": "llama"})
    with pytest.raises(ConfigError, match="mlp_only_layers"):
        MoESpec.from_hf({**HF["qwen3-30b"], "mlp_only_layers": [3]})
    with pytest.raises(ConfigError, match="num_experts_per_tok"):
        MoESpec.from_hf({k: v for k, v in HF["mixtral-8x7b"].items() if k != "num_experts_per_tok"})


def test_unknown_missing_and_unitless_keys_are_refused() -> None:
    data = cluster_preset("h800x16").to_dict()
    with pytest.raises(ConfigError, match="no key 'nodez'"):
        ClusterSpec.from_dict({**data, "nodez": 3})
    with pytest.raises(ConfigError, match="needs the key 'gpu'"):
        ClusterSpec.from_dict({k: v for k, v in data.items() if k != "gpu"})
    with pytest.raises(ConfigError, match=r"nic_bandwidth=50000000000.* no unit"):
        ClusterSpec.from_dict({**data, "nic_bandwidth": 50e9})
    with pytest.raises(ConfigError, match=r"peak_flops\.bf16"):
        ClusterSpec.from_dict({**data, "gpu": {**data["gpu"], "peak_flops": {"bf16": 989}}})
    with pytest.raises(ConfigError, match="no key 'batch'"):
        Workload.from_dict({"seq_len": 8, "micro_batch": 1, "global_batch": 1, "batch": 3})
    with pytest.raises(ConfigError, match="no key 'experts'"):
        MoESpec.from_dict({**model_preset("qwen3-30b").to_dict(), "experts": 3})


def test_impossible_clusters_and_workloads_are_refused() -> None:
    spec = cluster_preset("h800x16")
    with pytest.raises(ConfigError, match="nics_per_node=0"):
        replace(spec, nics_per_node=0)
    assert replace(cluster_preset("h800x8"), nics_per_node=0).nics == 0  # one node needs none
    with pytest.raises(ConfigError, match="reserved_bytes"):
        replace(spec, reserved_bytes=1e12)
    with pytest.raises(ConfigError, match="no peak for dtype 'int4'"):
        spec.gpu.peak("int4")
    with pytest.raises(ConfigError, match="global_batch=10"):
        Workload(seq_len=8, micro_batch=4, global_batch=10)
    with pytest.raises(ConfigError, match="imbalance"):
        Workload(seq_len=8, micro_batch=1, global_batch=1, imbalance=0.5)
    with pytest.raises(ConfigError, match="save='none'"):
        Workload(seq_len=8, micro_batch=1, global_batch=1, save="none")  # type: ignore[arg-type]
    for text in ("h800", "h800x0", "tpux8", "h800xmany"):
        with pytest.raises(ConfigError, match="no cluster preset"):
            cluster_preset(text)
    with pytest.raises(ConfigError, match="not whole nodes"):
        cluster_preset("h800x12")
    with pytest.raises(ConfigError, match="no model preset"):
        model_preset("gpt-9")
    with pytest.raises(ConfigError, match="no GPU preset"):
        gpu_preset("abacus")


def test_unreadable_files_are_refused_by_name(tmp_path: Path) -> None:
    for name, text, what in (("a.json", "{", "not JSON"), ("b.yaml", "a: [", "not YAML"), ("c.json", "[1]", "a list")):
        (tmp_path / name).write_text(text)
        with pytest.raises(ConfigError, match=what):
            load_mapping(tmp_path / name)
    with pytest.raises(ConfigError, match="cannot read"):
        load_mapping(tmp_path / "missing.json")


@given(st.lists(st.tuples(st.floats(1, 1e6), st.floats(0.01, 1)), min_size=1, max_size=5), st.floats(0.1, 1e7))
def test_efficiency_stays_within_its_points(points: list[tuple[float, float]], size: float) -> None:
    points = sorted({x: (x, y) for x, y in points}.values())
    e = Efficiency(tuple(points))
    shares = [y for _, y in points]
    assert min(shares) * (1 - 1e-12) <= e(size) <= max(shares) * (1 + 1e-12)
    for x, y in points:
        assert math.isclose(e(x), y)


def test_efficiency_refuses_nonsense() -> None:
    for points in ((), ((1, 0),), ((1, 1.5),), ((2, 0.5), (1, 0.5)), ((0, 0.5),)):
        with pytest.raises(ConfigError, match="efficiency"):
            Efficiency(points)
    with pytest.raises(ConfigError, match="gemm"):
        Efficiency.parse("fast", name="gemm")
