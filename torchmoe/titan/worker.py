"""One rank of the main job, started by ``python -m torchmoe.titan.main`` through torchrun."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from torchmoe.errors import ConfigError, TorchMoEError
from torchmoe.pipeline.trace import Event
from torchmoe.titan.output import History, hold
from torchmoe.titan.recipe import load_recipe
from torchmoe.titan.text import byte_entropy

__all__ = ["main", "prepare", "quiet", "train"]

EVALUATION_SEQUENCES = 256


def quiet() -> None:
    """torchtitan logs every step on every rank; the main job prints one line."""
    logging.getLogger().setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")


def prepare(run: Mapping[str, Any], folder: Path) -> Any:
    """The recipe's config with the run's data, output folder and checkpoints."""
    config = load_recipe(run["module"], run["config"], run["options"])
    from torchmoe.titan.data import TextDataLoader

    if not isinstance(config.dataloader, TextDataLoader.Config):
        raise ConfigError(
            f"recipe {run['config']!r} reads its data by {type(config.dataloader).__qualname__}; this command needs byte "
            "text (TextDataLoader), start other recipes with torchrun -m torchtitan.train"
        )
    if run["data"] is not None:
        config.dataloader.folder = run["data"]
    if run["steps"] is not None:
        config.training.steps = run["steps"]
    config.dump_folder = str(folder)
    config.checkpoint.enable = True
    config.checkpoint.last_save_model_only = False
    config.metrics.enable_tensorboard = True
    return config


class _Progress:
    """History and progress line of rank 0 around every step."""

    def __init__(self, trainer: Any, folder: Path) -> None:
        self.trainer, self.inner = trainer, trainer.train_step
        self.first = dist.get_rank() == 0
        self.history = History(folder)
        self.steps = trainer.config.training.steps
        self.started = 0
        self.seconds: list[float] = []

    def __call__(self, data_iterator: Any) -> None:
        trainer = self.trainer
        if not self.seconds:
            self.started = trainer.step - 1
            if self.first:
                self.history.start_after(self.started)
                if self.started:
                    print(f"resumed after step {self.started}", flush=True)
        start = time.perf_counter()
        self.inner(data_iterator)
        seconds = time.perf_counter() - start
        self.seconds.append(seconds)
        if self.first:
            m = trainer.last_metrics
            row = {
                "step": trainer.step,
                "loss": m["loss"],
                "grad_norm": m["grad_norm"],
                "tokens": m["tokens"],
                "seconds": seconds,
            }
            self.history.append({**row, "load": trainer.load_LE.tolist()})
            self._line(trainer.step, m)

    def _line(self, step: int, m: Mapping[str, float]) -> None:
        recent = self.seconds[-20:]
        each = sum(recent) / len(recent)
        left = each * (self.steps - step)
        text = (
            f"step {step:4d}/{self.steps}  loss {m['loss']:.4f}  {m['tokens'] / each:8,.0f} tokens/s  "
            f"ETA {int(left) // 60}:{int(left) % 60:02d}"
        )
        if sys.stdout.isatty():
            print(f"\r{text}   ", end="" if step < self.steps else "\n", flush=True)
        elif step == self.started + 1 or step % 10 == 0 or step == self.steps:
            print(text, flush=True)


def _evaluate(trainer: Any) -> dict[str, float]:
    from torchmoe.titan.evaluate import experts_zeroed, held_out_batches, own_token_attention

    parts = trainer.model_parts
    micro = trainer.config.parallelism.pipeline_parallel_microbatch_size
    batches = held_out_batches(trainer, EVALUATION_SEQUENCES // micro)
    out = {"held_out": trainer.evaluate(batches), "tokens": float(len(batches) * micro * trainer.config.training.seq_len)}
    with experts_zeroed(parts):
        out["experts_zeroed"] = trainer.evaluate(batches)
    with own_token_attention(parts):
        out["own_token_attention"] = trainer.evaluate(batches)
    return out


def _shape(trainer: Any, parameters: int) -> dict[str, Any]:
    exchange, placement = trainer.runner.exchange, trainer.roles.placement
    return {
        "attention": list(placement.attention),
        "ffn": list(placement.ffn),
        "replicas": placement.replicas,
        "ranks": placement.world_size,
        "moe_layers": placement.num_layers,
        "experts": placement.num_experts,
        "top_k": exchange.top_k,
        "dim": exchange.dim,
        "itemsize": exchange.dtype.itemsize,
        "parameters": parameters,
    }


def _corpus(trainer: Any) -> dict[str, Any]:
    corpus = trainer.dataloader.corpus
    entropy = byte_entropy(corpus.held_out)
    return {
        "name": corpus.name,
        "bytes": corpus.num_bytes,
        "held_out_bytes": corpus.held_out.numel(),
        "documents": corpus.documents,
        "sha256": corpus.sha256,
        "unigram": entropy.unigram,
        "bigram": entropy.bigram,
    }


def _count_parameters(trainer: Any) -> int:
    """Parameters of the whole model, each counted once."""
    counted = [p for shared in trainer.sums if shared.counted for p in shared.parameters]
    mine = sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in counted)
    total = torch.tensor([mine], device=trainer.device)
    dist.all_reduce(total)
    return int(total)


def _keep_events(folder: Path, events: list[Event]) -> list[Event]:
    """The last step's events; those kept before, if this process made no step (the run was killed while it evaluated)."""
    path = folder / "events.json"
    if events:
        path.write_text(json.dumps(events))
        return events
    return [Event(*e) for e in json.loads(path.read_text())] if path.exists() else []


def _finish(trainer: Any, run: Mapping[str, Any], folder: Path, history: Any) -> None:
    """Evaluate on all ranks, then let rank 0 write what is left behind."""
    from torchmoe.titan.report import closing_table, summarise, write_pictures, write_summary

    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, list(trainer.runner.events))
    step_events = _keep_events(folder, [e for part in gathered for e in part]) if dist.get_rank() == 0 else []
    evaluation = _evaluate(trainer)
    parameters = _count_parameters(trainer)
    if dist.get_rank() == 0:
        rows = history.read()
        shape = {**_shape(trainer, parameters), "tokens": rows[-1]["tokens"]}
        summary = summarise(rows, step_events, evaluation, corpus=_corpus(trainer), shape=shape, run=run)
        summary["pictures"] = write_pictures(folder, summary, rows, step_events)
        print(closing_table(summary), flush=True)
        if "loss.png" not in summary["pictures"]:
            print("no pictures: matplotlib is not installed; pip install 'torchmoe[viz]'", flush=True)
        write_summary(folder, summary)
        print(f"left in {folder}: summary.json, checkpoint/, tb/, {', '.join(summary['pictures'])}", flush=True)
    dist.barrier()


def train(run: Mapping[str, Any], folder: Path) -> None:
    """The whole job on this rank."""
    config = prepare(run, folder)
    lock: AbstractContextManager[Any] = hold(folder, "worker") if os.environ["RANK"] == "0" else nullcontext()
    trainer = config.build()
    try:
        progress = _Progress(trainer, folder)
        trainer.train_step = progress
        trainer.train()
        _finish(trainer, run, folder, progress.history)
    finally:
        trainer.close()
        lock.__exit__(None, None, None)
    dist.destroy_process_group()


def main(argv: Sequence[str] | None = None) -> None:
    folder = Path((argv if argv is not None else sys.argv[1:])[0])
    run = json.loads((folder / "run.json").read_text())
    if not run["verbose"]:
        quiet()
    try:
        train(run, folder)
    except TorchMoEError as e:
        print(f"rank {os.environ.get('RANK', '?')}: {type(e).__name__}: {e}", file=sys.stderr, flush=True)
        if run["verbose"]:
            raise
        os._exit(1)  # communicators of a failed run would block an orderly end


if __name__ == "__main__":
    main()
