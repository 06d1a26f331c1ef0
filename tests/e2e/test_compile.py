"""torch.compile of the attention half and of the loss (torchtitan's ``compile`` section) changes no loss and no gradient norm."""

from __future__ import annotations

from typing import Any

import pytest

from torchmoe.testing import run_ranks
from torchmoe.titan.preload import start


def train(ctx: Any, enable: bool) -> dict[str, Any]:
    """Two steps; the experts' rank has nothing to compile."""
    import logging

    from torch._dynamo.utils import counters
    from torchtitan.config import CompileConfig
    from torchtitan.distributed.activation_checkpoint import SelectiveAC

    from tests.e2e.recipe import RECIPE
    from torchmoe.titan.data import NoData
    from torchmoe.titan.parity_data import Tokens

    logging.getLogger().setLevel(logging.ERROR)
    config = RECIPE.disaggregated([1], [1])
    config.dataloader = NoData.Config()
    config.compile = CompileConfig(enable=enable, components=["model", "loss"])
    config.activation_checkpoint = SelectiveAC.Config()  # compile traces through it, as in torchtitan's own recipes
    trainer = config.build()
    logged: list[tuple[float, float]] = []
    trainer.metrics_processor.log = lambda step, loss, largest, norm, **_: logged.append((loss, norm))
    for step in (1, 2):
        trainer.step = step
        trainer.train_step(iter(Tokens().microbatches(step)))
    trainer.close()
    return {"logged": logged, "graphs": counters["stats"]["unique_graphs"], "breaks": dict(counters["graph_break"])}


def test_compiled_and_eager_attention_halves_agree() -> None:
    start()
    eager, compiled = (run_ranks(train, 2, backend="gloo", timeout=300, args=(enable,))[0] for enable in (False, True))
    assert eager["graphs"] == 0 < compiled["graphs"]
    assert not compiled["breaks"]
    for got, want in zip(compiled["logged"], eager["logged"], strict=True):
        assert got == pytest.approx(want, rel=1e-5)
