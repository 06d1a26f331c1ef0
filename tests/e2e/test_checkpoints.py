"""Stop and resume is bitwise; a checkpoint of a layout and one of a single process load each other, optimizer included, and
torchtitan's validation of the single process gives the same loss as ours."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from torchmoe.testing import run_ranks
from torchmoe.titan.preload import start

STEPS, STOP = 6, 3


def _trainer(recipe: str, folder: str, text: str, load_step: int = -1) -> Any:
    import logging

    from torchtitan.components.validate import Validator

    from tests.e2e import recipe as recipes
    from torchmoe.titan.data import TextDataLoader

    logging.getLogger().setLevel(logging.ERROR)
    config = getattr(recipes, recipe)()
    config.dump_folder = folder
    config.dataloader = TextDataLoader.Config(folder=text)
    held_out = TextDataLoader.Config(folder=text, split="held_out", infinite=False)
    config.validator = Validator.Config(enable=True, steps=-1, dataloader=held_out)
    config.checkpoint.enable, config.checkpoint.interval, config.checkpoint.load_step = True, STOP, load_step
    trainer = config.build()
    trainer.losses = []
    trainer.metrics_processor.log = lambda step, loss, *_, **__: trainer.losses.append(loss)
    trainer.validated = []
    trainer.metrics_processor.log_validation = lambda loss, step: trainer.validated.append(loss)
    trainer.checkpointer.load(step=load_step)
    return trainer


def _steps(trainer: Any, stop: int) -> list[float]:
    data = trainer.batch_generator(trainer.dataloader)
    while trainer.step < stop:
        trainer.step += 1
        trainer.train_step(data)
        trainer.checkpointer.save(trainer.step, last_step=trainer.step == STEPS)
    return list(trainer.losses)


def _state(trainer: Any) -> dict[str, torch.Tensor]:
    """Weights, balancing bias and optimizer moments by name, experts as (name, expert)."""
    from torch.distributed.tensor import DTensor

    from torchmoe.titan.checkpoint import ExpertShards

    states = trainer.checkpointer.states
    out: dict[str, torch.Tensor] = {}
    for key, value in {**states["model"].state_dict(), **states["optimizer"].state_dict()}.items():
        if not isinstance(value, torch.Tensor):
            continue
        if isinstance(value, ExpertShards):
            out |= {f"{key}[{e}]": value.local[i].clone() for i, e in enumerate(value.owned)}
            continue
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        if "inner_experts" in key and whole.dim() == 3:
            out |= {f"{key}[{e}]": whole[e].clone() for e in range(len(whole))}
        else:
            out[key] = whole.clone()
    return out


def disaggregated(ctx: Any, recipe: str, folder: str, text: str) -> dict[str, Any]:
    """Uninterrupted, then resumed from the middle."""
    whole = _trainer(recipe, folder, text)
    losses = _steps(whole, STEPS)
    final, position = _state(whole), whole.dataloader.state_dict()
    whole.close()
    again = _trainer(recipe, folder, text, load_step=STOP)
    middle, at = _state(again), again.step
    resumed = _steps(again, STEPS)
    end = _state(again)
    again.close()
    return {
        "losses": losses,
        "resumed": resumed,
        "at": at,
        "middle": middle,
        "final": final,
        "same": sorted(final) == sorted(end) and all(torch.equal(final[k], end[k]) for k in final),
        "position": position,
        "tokens": again.ntokens_seen,
    }


def single(ctx: Any, folder: str, text: str) -> dict[str, Any]:
    """One process goes on from the disaggregated checkpoint, on torchtitan's own path."""
    from torchmoe.titan.exact import exact_casts

    with exact_casts(torch.float32):
        trainer = _trainer("homogeneous", folder, text, load_step=STOP)
        loaded, at = _state(trainer), trainer.step
        losses = _steps(trainer, STEPS)
        out = {
            "loaded": loaded,
            "at": at,
            "losses": losses,
            "final": _state(trainer),
            "position": trainer.dataloader.state_dict(),
        }
        trainer.validator.validate(trainer.model_parts, STEPS)
        out["validated"] = trainer.validated[0]
        trainer.close()
    return out


def load_only(ctx: Any, recipe: str, folder: str, text: str) -> dict[str, Any]:
    from torchmoe.titan.data import TextDataLoader

    trainer = _trainer(recipe, folder, text, load_step=STEPS)
    out = {"state": _state(trainer), "position": trainer.dataloader.state_dict(), "step": trainer.step}
    trainer.validator.validate(trainer.model_parts, STEPS)
    out["validated"] = trainer.validated[0]
    held_out = TextDataLoader.Config(folder=text, split="held_out")
    rest = {"dp_world_size": 1, "dp_rank": 0, "tokenizer": trainer.tokenizer, "seq_len": trainer.config.training.seq_len}
    for sequences in (4, 2, 1):  # of a micro-batch: as in training, fewer, and one for two ranks
        loader = iter(held_out.build(**rest, local_batch_size=sequences))
        out[f"by {sequences}"] = trainer.evaluate([next(loader) for _ in range(16 // sequences)])
    trainer.close()
    return out


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("text")
    (path / "a.txt").write_text("".join(f"line {i}: {i * i % 97} sheep\n" for i in range(400)))
    return str(path)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, text: str) -> Iterator[dict[str, Any]]:
    start()
    folder = tmp_path_factory.mktemp("run")
    ranks = run_ranks(disaggregated, 4, backend="gloo", timeout=240, args=("cpu_2a2f", str(folder), text))
    shutil.rmtree(folder / "checkpoint" / f"step-{STEPS}")  # the single process writes its own
    one = run_ranks(single, 1, backend="gloo", timeout=240, args=(str(folder), text))[0]
    yield {"ranks": ranks, "one": one, "folder": folder}


def test_stop_and_resume_gives_bitwise_the_uninterrupted_losses(runs: dict[str, Any]) -> None:
    for r in runs["ranks"]:
        assert r["at"] == STOP and len(r["losses"]) == STEPS
        assert r["resumed"] == r["losses"][STOP:]
        assert r["same"], "weights, bias or optimizer differ after resuming"
        assert r["tokens"] == STEPS * 16 * 16
    assert runs["ranks"][0]["position"] == {"next_sequence": STEPS * 16}
    assert runs["ranks"][2]["position"] == {}


def test_a_single_process_loads_a_disaggregated_checkpoint_and_goes_on(runs: dict[str, Any]) -> None:
    one = runs["one"]
    assert one["at"] == STOP
    seen = set()
    for r in runs["ranks"]:
        for key, value in r["middle"].items():
            assert torch.equal(one["loaded"][key], value), key
            seen.add(key)
    assert seen == set(one["loaded"])
    assert any("exp_avg_sq" in k and "inner_experts" in k for k in seen) and any("expert_bias_E" in k for k in seen)
    assert one["losses"] == pytest.approx(runs["ranks"][0]["losses"][STOP:], abs=1e-5)
    assert one["position"] == {"next_sequence": STEPS * 16}


@pytest.mark.parametrize("recipe", ["all_options", "sharded"])
def test_any_options_resume_bitwise_and_a_plain_layout_loads_their_checkpoint(
    tmp_path: Path, text: str, runs: dict[str, Any], recipe: str
) -> None:
    ranks = run_ranks(disaggregated, 4, backend="gloo", timeout=240, args=(recipe, str(tmp_path), text))
    for r in ranks:
        assert r["resumed"] == r["losses"][STOP:] and r["same"]
    assert ranks[0]["losses"] == pytest.approx(runs["ranks"][0]["losses"], abs=1e-5)
    plain = runs["ranks"][0]["middle"]
    biases = {k: v for r in ranks for k, v in r["middle"].items() if "expert_bias_E" in k}
    assert len(biases) == 3 and all(torch.equal(v, plain[k]) for k, v in biases.items())  # recomputed tokens count once
    final = {k: v for r in ranks for k, v in r["final"].items()}
    for r in run_ranks(load_only, 4, backend="gloo", timeout=240, args=("cpu_2a2f", str(tmp_path), text)):
        assert r["state"] and all(torch.equal(v, final[k]) for k, v in r["state"].items())


@pytest.mark.parametrize("recipe", ["cpu_2a2f", "cpu_4a4f", "all_options", "sharded"])
def test_a_disaggregated_run_loads_the_checkpoint_of_a_single_process(runs: dict[str, Any], text: str, recipe: str) -> None:
    final = runs["one"]["final"]
    seen = set()
    for rank, r in enumerate(run_ranks(load_only, 4, backend="gloo", timeout=240, args=(recipe, str(runs["folder"]), text))):
        assert r["step"] == STEPS
        assert r["position"] == ({"next_sequence": STEPS * 16} if rank < 2 else {})
        for loss in ("validated", "by 4", "by 2", "by 1"):
            assert r[loss] == pytest.approx(runs["one"]["validated"], abs=1e-5)
        for key, value in r["state"].items():
            assert torch.equal(final[key], value), key
            seen.add(key)
    assert seen == set(final)
