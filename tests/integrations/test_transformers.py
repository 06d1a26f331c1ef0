"""transformers' experts modules and routers against torchmoe, in the same process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from torchmoe.errors import ConfigError
from torchmoe.integrations.transformers import register
from torchmoe.router import TopKRouter

pytest.importorskip("transformers", reason="the adapter is for transformers; pip install 'torchmoe[test]'")


def build(kind: str) -> tuple[Any, Any]:
    """(config, experts module) of a tiny model, random weights, fp64."""
    from transformers.models.deepseek_v3 import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Experts
    from transformers.models.gpt_oss import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
    from transformers.models.mixtral import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts
    from transformers.models.qwen3_moe import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    config, cls = {
        "qwen3": lambda: (Qwen3MoeConfig(hidden_size=12, moe_intermediate_size=10, num_experts=8), Qwen3MoeExperts),
        "mixtral": lambda: (MixtralConfig(hidden_size=12, intermediate_size=10, num_local_experts=8), MixtralExperts),
        "deepseek_v3": lambda: (
            DeepseekV3Config(hidden_size=12, moe_intermediate_size=10, n_routed_experts=8),
            DeepseekV3Experts,
        ),
        "gpt_oss": lambda: (GptOssConfig(hidden_size=12, intermediate_size=10, num_local_experts=8), GptOssExperts),
    }[kind]()
    torch.manual_seed(0)
    module = cls(config).double()
    with torch.no_grad():
        for p in module.parameters():
            p.normal_()
    return config, module


@pytest.mark.parametrize("kind", ["qwen3", "mixtral", "deepseek_v3", "gpt_oss"])
def test_registered_experts_equal_the_eager_ones(kind: str) -> None:
    """NVIDIA/Megatron-LM#4167, Dao-AILab/sonic-moe#45: a drop-in, whatever the layout (concatenated, interleaved, transposed)."""
    register()
    config, module = build(kind)
    x = torch.randn(9, 12, dtype=torch.float64, requires_grad=True)
    ids = torch.stack([torch.randperm(8)[:3] for _ in range(9)])
    gates = torch.rand(9, 3, dtype=torch.float64, requires_grad=True)
    results = []
    for implementation in ("eager", "torchmoe"):
        config._experts_implementation = implementation
        y = module(x, ids, gates)
        results.append((y, *torch.autograd.grad(y.square().sum(), (x, gates, *module.parameters()))))
    for want, got in zip(*results, strict=True):
        assert (got - want).norm() <= 1e-12 * want.norm()


def test_a_whole_model_runs_on_it() -> None:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    register()
    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=16,
        moe_intermediate_size=8,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
    )
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(config)
    tokens = torch.randint(0, 64, (2, 7))
    losses = []
    for implementation in ("eager", "torchmoe"):
        model.set_experts_implementation(implementation)
        model.zero_grad()
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        losses.append((loss.item(), [p.grad.norm().item() for p in model.parameters() if p.grad is not None]))
    assert losses[0][0] == pytest.approx(losses[1][0], rel=1e-5)
    assert losses[0][1] == pytest.approx(losses[1][1], rel=1e-3)


def test_what_the_kernels_do_not_compute_is_refused() -> None:
    register()
    config, module = build("gpt_oss")
    config._experts_implementation = "torchmoe"
    module.limit = 5.0
    call = (torch.randn(2, 12, dtype=torch.float64), torch.zeros(2, 1, dtype=torch.long), torch.ones(2, 1))
    with pytest.raises(ConfigError, match=r"limit=5\.0"):
        module(*call)
    config, module = build("qwen3")
    config._experts_implementation = "torchmoe"
    config.hidden_act = "tanh"
    with pytest.raises(ConfigError, match="'tanh'"):
        module(*call)


def routers(kind: str) -> tuple[Any, TopKRouter]:
    from transformers.models.deepseek_v3 import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
    from transformers.models.gpt_oss import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
    from transformers.models.mixtral import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
    from transformers.models.qwen3_moe import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

    plain = {"score": "softmax", "normalize": True, "selection_bias": False}
    theirs, ours = {
        "qwen3": lambda: (
            Qwen3MoeTopKRouter(Qwen3MoeConfig(hidden_size=24, num_experts=16, num_experts_per_tok=4, norm_topk_prob=True)),
            plain,
        ),
        "qwen3 without norm": lambda: (
            Qwen3MoeTopKRouter(Qwen3MoeConfig(hidden_size=24, num_experts=16, num_experts_per_tok=4, norm_topk_prob=False)),
            {**plain, "normalize": False},
        ),
        "mixtral": lambda: (MixtralTopKRouter(MixtralConfig(hidden_size=24, num_local_experts=16, num_experts_per_tok=4)), plain),
        "gpt_oss": lambda: (
            GptOssTopKRouter(GptOssConfig(hidden_size=24, num_local_experts=16, num_experts_per_tok=4)),
            {**plain, "linear_bias": True},
        ),
        "deepseek_v3": lambda: (
            DeepseekV3TopkRouter(
                DeepseekV3Config(
                    hidden_size=24, n_routed_experts=16, num_experts_per_tok=4, n_group=4, topk_group=2, routed_scaling_factor=2.5
                )
            ),
            {"score": "sigmoid", "normalize": True, "scale": 2.5, "num_groups": 4, "top_groups": 2},
        ),
    }[kind]()
    router = TopKRouter(24, 16, 4, **ours)  # type: ignore[arg-type]
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        theirs.weight.copy_(torch.randn(16, 24, generator=g) * 0.3)
        router.weight_ED.copy_(theirs.weight)
        if router.bias_E is not None:
            theirs.bias.copy_(torch.randn(16, generator=g))
            router.bias_E.copy_(theirs.bias)
        if router.expert_bias_E is not None:
            theirs.e_score_correction_bias.copy_(torch.randn(16, generator=g) * 0.2)
            router.expert_bias_E.copy_(theirs.e_score_correction_bias)
    return theirs, router


@pytest.mark.parametrize("kind", ["qwen3", "qwen3 without norm", "mixtral", "gpt_oss", "deepseek_v3"])
def test_gates_and_gradients_equal_the_models_own_router(kind: str) -> None:
    """pytorch/torchtitan#1448, jingyaogong/minimind#797: normalisation, scale and groups as published."""
    theirs, router = routers(kind)
    x = torch.randn(200, 24, generator=torch.Generator().manual_seed(2))
    _, want_gates, want_ids = theirs(x)
    routing = router(x)
    order, want_order = routing.expert_ids_TK.long().sort(-1), want_ids.sort(-1)
    assert torch.equal(order.values, want_order.values)
    got, want = routing.gates_TK.gather(-1, order.indices), want_gates.gather(-1, want_order.indices)
    assert torch.allclose(got, want, rtol=1e-5, atol=1e-7)
    weights = torch.arange(1.0, 5.0)
    (got * weights).sum().backward()
    (want * weights).sum().backward()
    assert router.weight_ED.grad is not None
    assert (router.weight_ED.grad - theirs.weight.grad).norm() < 1e-4 * theirs.weight.grad.norm()
