"""Seconds of a real step under an allocation: what the allocator's local search measures with a run of the user's own recipe.

``TimedRun`` is the callable; run as a module this file is the program of one rank that it starts through torchrun.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchmoe.alloc.allocator import Allocation
from torchmoe.errors import ConfigError

__all__ = ["TimedRun"]


@dataclass(frozen=True)
class TimedRun:
    """Runs a disaggregated recipe on this machine with an allocation's groups, batch and memory mode; median seconds of a step.

    Args:
        module, config: the recipe, as in ``--module`` and ``--config``. Its model should be the one that is planned.
        steps: that are timed, after ``warmup`` others.
        options: more torchtitan options.
        timeout: seconds for a whole run; the processes are ended after it.
    """

    module: str
    config: str
    steps: int = 3
    warmup: int = 1
    options: Sequence[str] = ()
    timeout: float = 300.0

    def __post_init__(self) -> None:
        if self.steps < 1 or self.warmup < 0 or not self.timeout > 0:
            raise ConfigError(
                f"steps={self.steps} must be at least 1, warmup={self.warmup} at least 0, timeout={self.timeout} positive"
            )

    def __call__(self, a: Allocation) -> float:
        """Seconds of one step.

        Raises:
            ConfigError: the recipe cannot run this allocation; the search then counts it as failed.
            RuntimeError: the run failed or did not end in time.
        """
        run = {"module": self.module, "config": self.config, "options": list(self.options), **self._layout(a)}
        _configured(run)  # refuses before anything is started
        with tempfile.TemporaryDirectory(prefix="torchmoe-") as folder:
            told, answer = Path(folder, "run.json"), Path(folder, "answer.json")
            told.write_text(json.dumps(run))
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(a.gpus)]
            process = subprocess.Popen(
                [*command, "-m", "torchmoe.titan.timed", str(told), str(answer)],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
                env={"OMP_NUM_THREADS": "1", **os.environ},
            )
            try:
                output, _ = process.communicate(timeout=self.timeout)
            except BaseException as e:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                if isinstance(e, subprocess.TimeoutExpired):
                    raise RuntimeError(f"{self.config} with {_groups(a)} did not end within {self.timeout:g} s") from None
                raise
            if process.returncode or not answer.exists():
                last = "\n".join(output.strip().splitlines()[-15:])
                raise RuntimeError(f"{self.config} with {_groups(a)} failed with code {process.returncode}:\n{last}")
            seconds: list[float] = json.loads(answer.read_text())
            return statistics.median(seconds[self.warmup :])

    def _layout(self, a: Allocation) -> dict[str, Any]:
        return {
            "attention": a.attention_sizes,
            "ffn": a.ffn_sizes,
            "replicas": a.replicas,
            "cycle": a.cycle,
            "residual": None if a.residual == "local" else a.residual,
            "save": a.workload.save,
            "recompute": a.workload.recompute,
            "seq_len": a.workload.seq_len,
            "sequences": a.workload.global_batch,
            "microbatch": a.workload.micro_batch * a.replicas,
            "steps": self.warmup + self.steps,
        }


def _groups(a: Allocation) -> str:
    return f"attention={a.attention_sizes} ffn={a.ffn_sizes} replicas={a.replicas}"


def _configured(run: dict[str, Any]) -> Any:
    from torchmoe.titan.recipe import load_recipe

    config = load_recipe(run["module"], run["config"], run["options"])
    if not hasattr(config, "disag"):
        raise ConfigError(f"recipe {run['config']!r} is not disaggregated; give one that returns a DisagTrainer.Config")
    from torchtitan.distributed.activation_checkpoint import FullAC

    for key in ("attention", "ffn", "replicas", "cycle", "residual", "save"):
        setattr(config.disag, key, run[key])
    config.activation_checkpoint = FullAC.Config() if run["recompute"] == "full" else None
    config.training.seq_len, config.training.local_batch_size = run["seq_len"], run["sequences"]
    config.training.steps = run["steps"]
    config.parallelism.pipeline_parallel_microbatch_size = run["microbatch"]
    config.checkpoint.enable = False
    from torchmoe.titan.trainer import check_config

    check_config(config)
    return config


def main(told: str, answer: str) -> None:
    """One rank: train, and on the first write the seconds of every step (from a barrier before it to its end)."""
    config = _configured(json.loads(Path(told).read_text()))
    config.dump_folder = str(Path(told).parent / "out")
    import torch.distributed as dist

    trainer = config.build()
    step, seconds = trainer.train_step, []

    def timed(iterator: Any) -> None:
        dist.barrier()
        began = time.perf_counter()
        step(iterator)
        dist.barrier()
        seconds.append(time.perf_counter() - began)

    trainer.train_step = timed
    trainer.train()
    trainer.close()
    if os.environ["RANK"] == "0":
        Path(answer).write_text(json.dumps(seconds))


if __name__ == "__main__":
    main(*sys.argv[1:])
