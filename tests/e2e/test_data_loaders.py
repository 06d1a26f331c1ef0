"""torchtitan's own tokenizer and data loader feed a disaggregated run; a finite loader ends it on every rank, and validation runs
at its interval."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torchmoe.testing import run_ranks
from torchmoe.titan.preload import start

WORDS = [f"word{i}" for i in range(60)]


def train(ctx: Any, kind: str, folder: str, resume: int = -1) -> dict[str, Any]:
    import logging

    from torchtitan.components.validate import Validator

    from tests.e2e.recipe import RECIPE
    from torchmoe.titan.data import TextDataLoader

    logging.getLogger().setLevel(logging.ERROR)
    config = RECIPE.disaggregated([1], [1])
    if kind == "finite":
        config.dataloader = TextDataLoader.Config(folder=folder, infinite=False)
        config.validator = Validator.Config(enable=True, freq=2, steps=1, dataloader=TextDataLoader.Config(folder=folder))
        config.training.steps = 1000
    else:
        import datasets
        from torchtitan.components.tokenizer import HuggingFaceTokenizer
        from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader

        datasets.config.HF_DATASETS_CACHE = Path(folder) / "cache"
        config.hf_assets_path = folder
        config.tokenizer = HuggingFaceTokenizer.Config()
        config.dataloader = HuggingFaceTextDataLoader.Config(dataset="c4_test", dataset_path=f"{folder}/json")
        config.training.steps = 4
        config.dump_folder = f"{folder}/run"
        config.checkpoint.enable, config.checkpoint.interval, config.checkpoint.load_step = True, 2, resume
    trainer = config.build()
    losses: list[float] = []
    trainer.metrics_processor.log = lambda step, loss, *_, **__: losses.append(loss)
    validated: list[int] = []
    trainer.metrics_processor.log_validation = lambda loss, step: validated.append(step)
    trainer.train()
    windows = trainer.dataloader.sequences.windows if kind == "finite" and trainer.is_attention else None
    return {"losses": losses, "windows": windows, "validated": validated}


def test_a_finite_loader_ends_the_run_on_every_rank(tmp_path: Path) -> None:
    start()
    (tmp_path / "a.txt").write_text("".join(f"{i} bottles of milk\n" for i in range(90)))
    attention, ffn = run_ranks(train, 2, backend="gloo", timeout=200, args=("finite", str(tmp_path)))
    assert len(attention["losses"]) == attention["windows"] // 16 > 3
    assert ffn["losses"] == attention["losses"]
    assert attention["validated"] == ffn["validated"] == [1, *range(2, len(attention["losses"]) + 1, 2)]


def test_the_tokenizer_and_dataset_classes_of_torchtitan_work(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    start()
    vocabulary = {w: i for i, w in enumerate(["<unk>", "<s>", "</s>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}))
    (tmp_path / "json").mkdir()
    lines = [json.dumps({"text": " ".join(WORDS[(i * k) % 60] for k in range(40))}) for i in range(200)]
    (tmp_path / "json" / "data.json").write_text("\n".join(lines))
    attention, ffn = run_ranks(train, 2, backend="gloo", timeout=200, args=("huggingface", str(tmp_path)))
    assert len(attention["losses"]) == 4 and ffn["losses"] == attention["losses"]
    for rank in run_ranks(train, 2, backend="gloo", timeout=200, args=("huggingface", str(tmp_path), 2)):
        assert rank["losses"] == attention["losses"][2:]  # the loader goes on where it was
    assert attention["losses"][-1] < attention["losses"][0]
