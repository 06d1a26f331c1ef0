"""``plan --emit``: the torchtitan recipe that runs a plan. Text, built on the helpers of ``recipes.common``."""

from __future__ import annotations

from pathlib import Path

from torchmoe.alloc.allocator import Allocation
from torchmoe.alloc.planner import Plan, PlanReport
from torchmoe.costs.model import ModelShape
from torchmoe.errors import ConfigError

__all__ = ["check_target", "emit_recipe", "recipe_text"]

_HEAD = '''"""Written by ``python -m torchmoe plan --emit``: {what}

{details}
Start from the repository's root, one process per GPU:

    torchrun --nproc-per-node {per_node} -m torchtitan.train --module {module} --config {function}

(several nodes: the same line on each with torchrun's --nnodes, --node-rank and --rdzv-endpoint).
Text, learning rate and steps are placeholders: edit them.
"""

from typing import Any

from recipes.common import Recipe
from torchmoe.titan.model import MoEModel

RECIPE = Recipe(
    name="{name}",
    model=MoEModel(
{sizes}
    ),
    sequences={sequences},
    microbatch={microbatch},
    seq_len={seq_len},
    steps=1000,
    lr=3e-4,
    dtype="{dtype}",
)
'''

_SPLIT = '''

def planned() -> Any:
    """{what}"""
    config = RECIPE.disaggregated({attention}, {ffn})
    config.disag.replicas = {replicas}
    config.disag.cycle = {cycle}
    config.disag.save = "{save}"
{more}    return config
'''

_COLOCATED = '''

def planned() -> Any:
    """{what}"""
    config = RECIPE.homogeneous(ranks={data_ranks}, expert_parallel={ep})
    # torchtitan's mesh has the pipeline outermost and expert parallelism innermost: an EP group is {ep} consecutive ranks
    config.parallelism.pipeline_parallel_degree = {pp}
    config.parallelism.pipeline_parallel_schedule = "1F1B"
    config.parallelism.pipeline_parallel_microbatch_size = {local}
    # the planned memory is that of torchmoe's experts: they keep no more than save says
    config.override.imports = [("torchmoe.titan.override.grouped_experts", {{"save": "{save}"}})]
    return {wrapped}
'''

_CHECKPOINTED = '''

STAGES_RECOMPUTED = frozenset({stages})
"""Pipeline stages that do not fit without activation checkpointing: the first ones hold the most micro-batches."""


def _recompute_where_needed(config: Any) -> Any:
    from torchtitan.distributed.activation_checkpoint import FullAC

    spec = config.model_spec
    parallelize = spec.parallelize_fn

    def per_stage(model: Any, *, parallel_dims: Any, ac_config: Any, **rest: Any) -> Any:
        stage = parallel_dims.get_mesh("pp").get_local_rank() if parallel_dims.pp_enabled else 0
        return parallelize(
            model, parallel_dims=parallel_dims, ac_config=ac_config if stage in STAGES_RECOMPUTED else None, **rest
        )

    spec.parallelize_fn = per_stage
    config.activation_checkpoint = FullAC.Config()
    return config
'''


def _sizes(shape: ModelShape, seq_len: int) -> str:
    """Arguments of MoEModel, or a refusal: it builds torchtitan's qwen3 blocks."""
    odd = {
        "MLA": shape.mla,
        "sliding windows": any(shape.windows),
        "attention sinks": shape.attention_sinks,
        "biases": shape.qkv_bias or shape.output_bias or shape.expert_bias or shape.router_bias,
        "experts without a gate": not shape.glu,
        "tied embeddings": shape.tied_embeddings,
        "a gated shared expert": shape.shared_gate,
        "no vocabulary": not shape.vocab_size,
    }
    found = [k for k, v in odd.items() if v]
    if found:
        raise ConfigError(
            f"{shape.name} has {', '.join(found)}; recipes are written for qwen3-style models (GQA, gated experts, untied head): "
            "write its ModelSpec by hand and keep the degrees of the plan"
        )
    values = {
        "layers": shape.num_layers,
        "dim": shape.dim,
        "heads": shape.num_heads,
        "kv_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "experts": shape.num_experts,
        "top_k": shape.top_k,
        "expert_dim": shape.expert_dim,
        "vocab": shape.vocab_size,
    }
    if seq_len > 4096:
        values["positions"] = seq_len
    if shape.shared_dim:
        values["shared_dim"] = shape.shared_dim
    lines = [f"        {k}={v}," for k, v in values.items()]
    if shape.num_dense_layers:
        lines.append(f"        dense={tuple(range(shape.num_dense_layers))},")
        lines.append(f"        dense_dim={shape.dense_dim},")
    return "\n".join(lines)


def recipe_text(report: PlanReport, choice: Plan | Allocation, *, module: str = "recipes.planned") -> str:
    """The recipe of one plan of a report.

    Raises:
        ConfigError: a model or a dtype that the training program does not have.
    """
    split = isinstance(choice, Allocation)
    w = choice.workload if isinstance(choice, Allocation) else choice.costs.workload
    if isinstance(choice, Allocation):
        what = f"attention={choice.attention_sizes} ffn={choice.ffn_sizes} replicas={choice.replicas}"
    else:
        what = f"{choice.degrees}, {choice.costs.workload.recompute} recomputation"
    if w.dtype not in ("bf16", "fp32"):
        raise ConfigError(f"dtype {w.dtype} has no recipe; plan with bf16 or fp32")
    details = (
        f"Predicted for {report.model.name} on {report.cluster.name}: step {choice.step * 1e3:.3g} ms, MFU {choice.mfu:.1%}.\n"
    )
    sizes = _sizes(report.model, w.seq_len)
    if not report.model.qk_norm:
        details += "torchtitan's qwen3 block adds query and key norms that the planned model does not have.\n"
    text = _HEAD.format(
        what=what,
        details=details,
        per_node=min(report.cluster.gpus_per_node, choice.gpus if isinstance(choice, Allocation) else report.cluster.gpus),
        module=module,
        function="planned",
        name=report.model.name.replace('"', ""),
        sizes=sizes,
        sequences=w.global_batch,
        microbatch=w.micro_batch if split else max(1, w.micro_batch // choice.costs.ep),  # type: ignore[union-attr]
        seq_len=w.seq_len,
        dtype={"bf16": "bfloat16", "fp32": "float32"}[w.dtype],
    )
    if isinstance(choice, Allocation):
        # one global micro-batch spans the replicas, each takes its block of it
        text = text.replace(f"microbatch={w.micro_batch},", f"microbatch={w.micro_batch * choice.replicas},")
        return text + _SPLIT.format(
            what=what,
            attention=choice.attention_sizes,
            ffn=choice.ffn_sizes,
            replicas=choice.replicas,
            cycle=choice.cycle,
            save=w.save,
            more=_more(choice),
        )
    c = choice.costs
    stages = _recomputed(choice)
    if stages:
        text += _CHECKPOINTED.format(stages=stages)
    return text + _COLOCATED.format(
        what=what,
        data_ranks=c.ep * c.dp,
        ep=c.ep,
        pp=c.pp,
        local=max(1, w.micro_batch // c.ep),
        save=w.save,
        wrapped="_recompute_where_needed(config)" if stages else "config",
    )


def _more(choice: Allocation) -> str:
    """Lines of a split recipe for what is not the default."""
    lines = []
    if choice.residual == "ride":
        lines.append('    config.disag.residual = "ride"')
    if choice.workload.recompute == "full":
        lines.append("    from torchtitan.distributed.activation_checkpoint import FullAC")
        lines.append("")
        lines.append("    config.activation_checkpoint = FullAC.Config()")
    return "".join(f"{line}\n" for line in lines)


def _recomputed(plan: Plan) -> list[int]:
    """Stages that need recomputation to fit."""
    from dataclasses import replace

    c = plan.costs
    if c.workload.recompute == "none":
        return []
    plain = replace(c, workload=replace(c.workload, recompute="none"))
    room = c.cluster.gpu.hbm_bytes
    return [i for i in range(c.pp) if plain.memory(i).total > room]


def check_target(path: Path) -> None:
    """Refuse a file that could not be imported as a recipe.

    Raises:
        ConfigError: not a Python module's name, or no such folder.
    """
    if path.suffix != ".py" or not path.stem.isidentifier():
        raise ConfigError(
            f"a recipe {str(path)!r} is started as a module: its name must be letters, digits and _ with .py behind"
        )
    if not path.parent.is_dir():
        raise ConfigError(f"cannot write {path}: there is no folder {path.parent}; give a file in an existing folder")


def emit_recipe(report: PlanReport, path: Path, *, kind: str = "auto") -> None:
    """Write the recipe of the fastest plan that a recipe can express: "auto", "split" or "colocated".

    Raises:
        ConfigError: none can, or the folder is not writable.
    """
    check_target(path)
    module = ".".join(path.with_suffix("").parts[-2:])
    options: list[Plan | Allocation] = []
    if kind in ("auto", "split") and report.split is not None:
        options.append(report.split)
    if kind in ("auto", "colocated"):
        # torchtitan runs exchanges blocking
        options += [p for p in report.plans if p.costs.overlap == "none"][:1]
    refusals = []
    for choice in sorted(options, key=lambda p: p.step):
        try:
            text = recipe_text(report, choice, module=module)
        except ConfigError as e:
            refusals.append(str(e))
            continue
        try:
            path.write_text(text)
        except OSError as e:
            raise ConfigError(f"cannot write {path}: {e.strerror}; give a file in an existing folder") from None
        return
    raise ConfigError("no plan can be written as a recipe: " + ("; ".join(refusals) or f"there is no {kind} plan that fits"))
