"""torchtitan's own models: which are taken as they are, and a reason for the others before anything is launched."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch

from torchmoe.errors import ConfigError
from torchmoe.titan.shims import ensure

ensure()

from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig  # noqa: E402
from torchtitan.models import deepseek_v3, gpt_oss, kimi_k2_7  # noqa: E402
from torchtitan.models.deepseek_v3.config_registry import deepseek_v3_debugmodel  # noqa: E402
from torchtitan.models.gpt_oss.config_registry import gpt_oss_debugmodel  # noqa: E402
from torchtitan.models.qwen3.config_registry import qwen3_moe_debug  # noqa: E402
from torchtitan.models.qwen3.model import Qwen3Model  # noqa: E402

from torchmoe.titan.adapt import disaggregate  # noqa: E402
from torchmoe.titan.check import check_block, check_config, check_decoder, check_model, check_optimizer  # noqa: E402
from torchmoe.titan.model import MoEModel, model_spec  # noqa: E402
from torchmoe.titan.options import DisagConfig, matching_groups, placement_of  # noqa: E402
from torchmoe.titan.parity_models import MODELS  # noqa: E402
from torchmoe.titan.split import split_model  # noqa: E402
from torchmoe.titan.trainer import DisagTrainer, split_pipeline  # noqa: E402

DISAG = DisagConfig(attention=[1, 1], ffn=[2, 1])


@pytest.mark.parametrize("recipe", [deepseek_v3_debugmodel, qwen3_moe_debug], ids=lambda f: f.__name__)
def test_a_debug_recipe_of_torchtitan_is_taken_with_its_own_settings(recipe: Any) -> None:
    before = recipe()
    config = disaggregate(before, DISAG)
    with pytest.raises(ConfigError, match=r"mixed_precision_param='bfloat16' with training\.dtype='float32'"):
        check_config(config)
    config.training.mixed_precision_param = "float32"
    placement = check_config(config)
    assert (placement.world_size, placement.num_experts) == (5, before.model_spec.model.layers[-1].moe.num_experts)
    assert isinstance(config, DisagTrainer.Config) and config.model_spec.pipelining_fn is split_pipeline
    for name in ("loss", "optimizer", "lr_scheduler", "activation_checkpoint", "checkpoint", "dataloader"):
        assert getattr(config, name) is getattr(before, name)
    assert before.model_spec.pipelining_fn is not split_pipeline and not before.training.disable_cuda_graphs
    assert config.training.seq_len == before.training.seq_len


def test_degrees_of_the_recipe_become_groups_of_the_layout() -> None:
    before = deepseek_v3_debugmodel()
    before.parallelism.expert_parallel_degree, before.parallelism.data_parallel_shard_degree = 4, 8
    before.training.mixed_precision_param = "float32"
    check_config(disaggregate(before, DISAG))
    assert before.parallelism.expert_parallel_degree == 4


@pytest.mark.parametrize("name", MODELS)
def test_the_models_of_the_parity_job_pass_the_checks(name: str) -> None:
    spec = MODELS[name]()
    config = mock.Mock(model_spec=spec, disag=DisagConfig())
    check_model(spec.model, placement_of(config))


def test_node_limited_groups_of_a_large_router_are_checked_on_a_small_block() -> None:
    """256 experts in 8 groups, 4 of them and 8 experts per token, as in DeepSeek-V3 671B."""
    layer = deepseek_v3.model_registry("debugmodel").model.layers[1]
    moe, router = layer.moe, layer.moe.router
    moe.num_experts = router.num_experts = router.gate.out_features = 256
    moe.routed_experts.inner_experts.num_experts = moe.routed_experts.token_dispatcher.num_experts = 256
    moe.routed_experts.token_dispatcher.top_k = 8
    router.top_k, router.num_expert_groups, router.num_limited_groups, router.score_func = 8, 8, 4, "sigmoid"
    check_block(layer, "layers.1")


def test_gpt_oss_needs_an_attention_that_runs_here_and_the_limit_of_the_kernels() -> None:
    reason = r"layers\.0: GPT-OSS's attention has sinks and windows, .* run it on a GPU"
    no_gpu = mock.patch.object(torch.accelerator, "is_available", lambda: False)
    with no_gpu, pytest.raises(ConfigError, match=reason):
        disaggregate(gpt_oss_debugmodel(), DISAG)
    spec = gpt_oss.model_registry("debugmodel")
    for layer in spec.model.layers:
        layer.moe.routed_experts.inner_experts.swiglu_limit = 5.0
    placement = placement_of(mock.Mock(model_spec=spec, disag=DISAG))
    with torch.device("meta"):
        model = spec.model.build()
    with pytest.raises(ConfigError, match=r"layers\.0: swiglu_limit=5\.0, and the kernels clamp at 7"):
        split_model(model, placement, placement.where(0), loss_fn=None)


class Scaled(Qwen3Model):
    """Embeddings times sqrt(dim), as some models have them: no stage would do that."""

    @dataclass(kw_only=True, slots=True)
    class Config(Qwen3Model.Config):
        pass

    def forward(self, tokens: Any, positions: Any = None, attention_masks: Any = None) -> Any:
        h = self.tok_embeddings(tokens) * self.config.dim**0.5
        for layer in self.layers.values():
            h = layer(h, attention_masks, positions)
        return self.lm_head(self.norm(h + 1))


def test_parts_that_no_stage_runs_are_refused() -> None:
    with pytest.raises(ConfigError, match="has 2 multi-token prediction layers, which no stage runs"):
        check_decoder(
            deepseek_v3.deepseekv3_configs["debugmodel"](attn_backend="flex", moe_comm_backend="standard", num_mtp_layers=2)
        )
    with pytest.raises(ConfigError, match="has vision_encoder, which no stage runs"):
        check_decoder(kimi_k2_7.model_registry("debugmodel").model)
    plain = model_spec(MoEModel()).model
    check_decoder(plain)
    from torchtitan.config import derive

    with pytest.raises(ConfigError, match=r"Scaled computes something else than head\(norm\(blocks\(embedding\)\)\)"):
        check_decoder(derive(plain, Scaled.Config))


def groups(*patterns: str) -> list[ParamGroupConfig]:
    return [ParamGroupConfig(pattern=p, optimizer_name="AdamW", optimizer_kwargs={"lr": 1e-3}) for p in patterns]


def test_patterns_of_the_optimizer_need_to_match_in_the_whole_model_only() -> None:
    model = model_spec(MoEModel()).model
    check_optimizer(model, OptimizersContainer.Config(param_groups=groups("norm", "inner_experts", ".*")))
    with pytest.raises(ConfigError, match="pattern 'nrom' matches no parameter"):
        check_optimizer(model, OptimizersContainer.Config(param_groups=groups("nrom", ".*")))
    with pytest.raises(ConfigError, match="pattern 'norm' matches no parameter that an earlier one has left"):
        check_optimizer(model, OptimizersContainer.Config(param_groups=groups(".*", "norm")))
    placement = placement_of(mock.Mock(model_spec=model_spec(MoEModel()), disag=DisagConfig()))
    kept = []
    for rank in range(2):
        with torch.device("meta"):
            part, _, _ = split_model(model.build(), placement, placement.where(rank), loss_fn=None)
        kept.append([g.pattern for g in matching_groups(groups("norm", "inner_experts", ".*"), part)])
    assert kept == [["norm", ".*"], ["inner_experts"]]
