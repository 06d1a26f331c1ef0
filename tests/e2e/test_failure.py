"""A rank that is killed, frozen or fails in mid-step: every survivor ends within its deadline and names that rank."""

from __future__ import annotations

import os
import signal
import subprocess
from typing import Any

import pytest

from torchmoe.errors import ConfigError, PeerLost
from torchmoe.testing import run_ranks
from torchmoe.testing.ranks import RankFailure
from torchmoe.titan.preload import start

DEADLINE, FROZEN = 4.0, 14.0
NAMES = ["rank 0 (A0[0])", "rank 1 (A0[1])", "rank 2 (F0[0])", "rank 3 (F0[1])"]


def doomed(ctx: Any, victim: int, action: str) -> None:
    """Train; in the middle of step 3 the victim kills or freezes itself, or fails. A frozen process is killed after FROZEN s."""
    from tests.e2e import recipe as recipes
    from torchmoe.titan.data import NoData
    from torchmoe.titan.parity_data import Tokens

    config = recipes.cpu_2a2f()
    config.dataloader = NoData.Config()
    config.disag.exchange_seconds = DEADLINE
    trainer = config.build()
    runner = trainer.runner

    def die() -> None:
        if trainer.step == 3 and ctx.rank == victim:
            if action == "fail":
                raise ValueError("out of cheese")
            if action == "freeze":
                subprocess.Popen(["sh", "-c", f"sleep {FROZEN}; kill -9 {os.getpid()}"])
            os.kill(os.getpid(), signal.SIGSTOP if action == "freeze" else signal.SIGKILL)

    def wrap(stage: Any, name: str) -> Any:
        inner = getattr(stage, name)

        def call(*args: Any) -> Any:
            die()
            return inner(*args)

        return call

    for stage in runner.stages.experts.values():
        stage.backward_input = wrap(stage, "backward_input")
    for stage in runner.stages.attention.values():
        stage.block.moe.router.forward = wrap(stage.block.moe.router, "forward")
    for step in range(1, 5):
        trainer.step = step
        trainer.train_step(iter(Tokens().microbatches(step)))


def check_survivors(results: list[Any], victim: int, seconds: float, *, within: float) -> None:
    for rank, failure in enumerate(results):
        if rank != victim:
            assert isinstance(failure, RankFailure) and isinstance(failure.error, PeerLost), failure
            cause = str(failure.error).split("this rank was waiting here")[0]
            assert f"step 3 on {NAMES[rank]}: {NAMES[victim]} " in cause, failure.text
            assert failure.seconds - seconds < within, failure.text


@pytest.mark.parametrize("victim", [1, 2])
def test_every_survivor_names_the_killed_rank_within_ten_seconds(victim: int) -> None:
    start()
    results = run_ranks(doomed, 4, backend="gloo", timeout=120, args=(victim, "kill"), check=False)
    assert "signal 9" in results[victim].text
    check_survivors(results, victim, results[victim].seconds, within=10)


@pytest.mark.parametrize("victim", [0, 3])
def test_every_survivor_names_the_frozen_rank_soon_after_its_deadline(victim: int) -> None:
    """A frozen process keeps its connections open: only the deadline and the silent heartbeat tell."""
    start()
    results = run_ranks(doomed, 4, backend="gloo", timeout=120, args=(victim, "freeze"), check=False)
    frozen = results[victim].seconds - FROZEN
    check_survivors(results, victim, frozen, within=DEADLINE + 5)


def test_an_error_of_one_rank_is_named_by_the_others() -> None:
    start()
    results = run_ranks(doomed, 4, backend="gloo", timeout=120, args=(3, "fail"), check=False)
    assert isinstance(results[3].error, ValueError)
    check_survivors(results, 3, results[3].seconds, within=10)
    assert all("gave up first: ValueError: out of cheese" in str(results[r].error) for r in range(3))


def idle(ctx: Any) -> None:
    """Both attention ranks are without tokens in some micro-batch."""
    from tests.e2e import recipe as recipes
    from torchmoe.titan.data import NoData
    from torchmoe.titan.parity import IDLE
    from torchmoe.titan.parity_data import Tokens

    config = recipes.sharded()
    config.dataloader = NoData.Config()
    trainer = config.build()
    trainer.step = 1
    trainer.train_step(iter(Tokens(IDLE).microbatches(1)))


def test_a_rank_without_tokens_cannot_hold_shards_and_says_so() -> None:
    start()
    results = run_ranks(idle, 4, backend="gloo", timeout=60, check=False)
    for rank in (0, 1):
        assert (
            isinstance(results[rank].error, ConfigError) and f"{NAMES[rank]} has no token of a micro-batch" in results[rank].text
        )
    for rank in (2, 3):
        assert isinstance(results[rank].error, PeerLost) and "gave up first: ConfigError" in results[rank].text
