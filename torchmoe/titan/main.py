"""``python -m torchmoe.titan.main``: check a recipe, choose the output folder, start torchrun, say how it ended.

Everything that can be refused is refused here, in one process and one sentence, before anything is launched.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchmoe.errors import ConfigError, TorchMoEError
from torchmoe.titan.output import choose_folder, hold
from torchmoe.titan.worker import quiet

__all__ = ["check", "main"]

DEFAULT_MODULE, DEFAULT_CONFIG = "recipes.disag_tiny", "cpu_2a2f"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m torchmoe.titan.main",
        description="Train a recipe with attention and experts on different ranks. Options that are not listed here go to "
        "torchtitan, e.g. --optimizer.implementation foreach.",
    )
    parser.add_argument("--module", default=DEFAULT_MODULE, help=f"module with recipes (default {DEFAULT_MODULE})")
    parser.add_argument("--config", default=DEFAULT_CONFIG, help=f"function in it (default {DEFAULT_CONFIG})")
    parser.add_argument("--data", help="folder with text files; default: texts and sources of this Python")
    parser.add_argument("--steps", type=int, help="training steps; default: the recipe's")
    parser.add_argument("--output", default="outputs", type=Path, help="where run folders are (default outputs)")
    parser.add_argument("--name", help="name of the run folder; default: the recipe's")
    parser.add_argument("--verbose", action="store_true", help="show torchtitan's own log")
    return parser


def check(run: dict[str, Any]) -> Any:
    """Refuse what cannot run; returns the placement and notes the checksum of the text in ``run``.

    Raises:
        ConfigError: one sentence with the value, the rule and the remedy.
    """
    from torchmoe.titan.data import Sequences
    from torchmoe.titan.text import check_folder, load_corpus
    from torchmoe.titan.trainer import DisagTrainer, check_config
    from torchmoe.titan.worker import prepare

    if run["data"] is not None:
        check_folder(run["data"])
    config = prepare(run, Path("outputs"))
    if not isinstance(config, DisagTrainer.Config):
        raise ConfigError(
            f"recipe {run['config']!r} builds torchtitan's own {type(config).__qualname__}, which this command does not start; "
            f"use torchrun -m torchtitan.train --module {run['module']} --config {run['config']}"
        )
    if config.training.steps < 1:
        raise ConfigError(f"training.steps={config.training.steps} must be at least 1; give --steps a positive number")
    placement = check_config(config)
    corpus = load_corpus(config.dataloader.folder)
    for split in ("train", "held_out"):
        what = f"{split.replace('_', '-')} part of the text of {corpus.name!r}"
        Sequences(corpus.split(split), seq_len=config.training.seq_len, seed=None, what=what)
    run["text_sha256"] = corpus.sha256
    return placement


def _describe(placement: Any, failures: dict[int, Any]) -> str:
    """The last lines of a failed run: who died, and how."""
    lines = []
    for rank, failure in sorted(failures.items(), key=lambda f: f[1].timestamp):
        where = placement.where(rank)
        if failure.exitcode < 0:
            how = f"was killed by {signal.Signals(-failure.exitcode).name}"
        else:
            how = f"exited with code {failure.exitcode}"
        lines.append(f"rank {rank} ({where.group}, process {failure.pid}) {how}")
    return "\n".join(lines)


def _launch(folder: Path, placement: Any) -> int:
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    arguments = ["--standalone", "--nproc-per-node", str(placement.world_size), "--shutdown-timeout", "5"]
    arguments += ["-m", "torchmoe.titan.worker", str(folder)]
    print(f"torchrun {' '.join(arguments)}", flush=True)
    try:
        torchrun(arguments)
    except (KeyboardInterrupt, SignalException):
        print("interrupted; the same command again resumes from the last checkpoint", file=sys.stderr, flush=True)
        return 130
    except ChildFailedError as e:
        print(str(e), file=sys.stderr)
        print(_describe(placement, e.failures), file=sys.stderr)
        print("the same command again resumes from the last checkpoint", file=sys.stderr, flush=True)
        return 1
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    options, rest = _parser().parse_known_args(argv)
    if not options.verbose:
        quiet()
    run = {
        "module": options.module,
        "config": options.config,
        "options": rest,
        "data": None if options.data is None else str(Path(options.data).expanduser().resolve()),
        "steps": options.steps,
        "verbose": options.verbose,
    }
    try:
        placement = check(run)
        folder, unfinished = choose_folder(options.output, options.name or options.config, run)
        lock = hold(folder)
        hold(folder, "worker").close()
    except TorchMoEError as e:
        print(f"{type(e).__name__}: {e}", file=sys.stderr)
        return 2
    print(placement.explain(), flush=True)
    print(f"{'continuing' if unfinished else 'writing'} {folder}", flush=True)
    with lock:
        return _launch(folder, placement)


if __name__ == "__main__":
    sys.exit(main())
