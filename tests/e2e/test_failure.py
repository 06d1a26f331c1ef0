"""kill -9 of any rank in mid-step: every survivor ends within 10 s and names the dead rank."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from torchmoe.errors import PeerLost
from torchmoe.testing import run_ranks
from torchmoe.testing.ranks import RankFailure
from torchmoe.titan.preload import start


def doomed(ctx: Any, victim: int, action: str) -> None:
    """Train; in step 3 the victim kills itself at the start of ``action``, or fails."""
    from tests.e2e import recipe as recipes
    from torchmoe.titan.parity_data import Tokens
    from torchmoe.titan.trainer import NoData

    config = recipes.cpu_2a2f()
    config.dataloader = NoData.Config()
    trainer = config.build()
    runner = trainer.runner

    def die() -> None:
        if trainer.step == 3 and ctx.rank == victim:
            if action == "fail":
                raise ValueError("out of cheese")
            os.kill(os.getpid(), signal.SIGKILL)

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


@pytest.mark.parametrize("victim", range(4))
def test_every_survivor_names_the_killed_rank_within_ten_seconds(victim: int) -> None:
    start()
    results = run_ranks(doomed, 4, backend="gloo", timeout=120, args=(victim, "kill"), check=False)
    assert all(isinstance(r, RankFailure) for r in results)
    assert "signal 9" in results[victim].text
    group = f"rank {victim} ({'A0' if victim < 2 else 'F0'}[{victim % 2}])"
    for rank, failure in enumerate(results):
        if rank != victim:
            assert isinstance(failure.error, PeerLost), failure.text
            assert group in str(failure.error).split("this rank was waiting")[0], failure.text
            assert "waiting here" in str(failure.error)
            assert failure.seconds - results[victim].seconds < 10


def test_an_error_of_one_rank_is_named_by_the_others() -> None:
    start()
    results = run_ranks(doomed, 4, backend="gloo", timeout=120, args=(3, "fail"), check=False)
    assert isinstance(results[3].error, ValueError)
    for rank in range(3):
        text = str(results[rank].error)
        assert isinstance(results[rank].error, PeerLost)
        assert "rank 3 (F0[1])" in text, text
