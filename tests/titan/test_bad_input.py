"""What cannot run is refused by the launcher in one sentence, before anything is launched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from torchmoe.titan import main as launcher
from torchmoe.titan.output import History, choose_folder, hold
from torchmoe.titan.shims import ensure

ensure()

MODULE = ["--module", "tests.e2e.recipe"]


@pytest.fixture
def text(tmp_path: Path) -> str:
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "a.txt").write_text("some text to train on, long enough for sequences\n" * 40)
    return str(folder)


def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str]) -> str:
    """Run the launcher, which must neither start anything nor print a traceback; returns its sentence."""
    monkeypatch.setattr(launcher, "_launch", lambda *_: pytest.fail("something was launched"))
    assert launcher.main(arguments) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("ConfigError: ")
    return lines[0]


CASES: dict[str, tuple[list[str], str]] = {
    "no such module": (["--module", "recipes.disag_tinny"], "recipe module 'recipes.disag_tinny' does not exist"),
    "no such package": (["--module", "recepies.disag_tiny"], "no module 'recepies'"),
    "no such recipe": (
        ["--config", "cpu_9a9f"],
        "it has all_options, cpu_2a2f, cpu_4a4f, dense_last, homogeneous, sharded, tied, validated_without_end",
    ),
    "not disaggregated": (["--config", "homogeneous"], "torchrun -m torchtitan.train"),
    "no steps": (["--steps", "0"], "training.steps=0 must be at least 1"),
    "an empty group": (["--disag.attention", "0"], "attention=[0]: every group needs at least one rank"),
    "more groups than layers": (["--disag.ffn", "1", "1", "1", "1"], "4 groups for 3 MoE layers"),
    "a cycle below 2p": (["--config", "cpu_4a4f", "--disag.cycle", "3"], "cycle=3 with 2 groups per role: below 2p = 4"),
    "fewer sequences than ranks": (
        ["--parallelism.pipeline_parallel_microbatch_size", "1"],
        "a micro-batch of 1 sequences over 2 attention ranks",
    ),
    "a batch that is no multiple": (["--training.local_batch_size", "18"], "is not a multiple of"),
    "tied embeddings across groups": (["--config", "tied"], "tied embeddings: the embedding is on A0 and the head on A1"),
    "residual local over two groups": (
        ["--config", "cpu_4a4f", "--disag.residual", "local"],
        "residual='local' with 2 attention groups: the next layer's attention is on another group",
    ),
    "residual direct in one group": (["--disag.residual", "direct"], "use residual='local'"),
    "slots that ride": (["--disag.residual", "ride", "--disag.combine", "slots"], "use combine='partial' or residual='direct'"),
    "fixed sizes without a capacity": (
        ["--disag.sizes", "fixed"],
        "disag.sizes='fixed' needs disag.capacity, the rows of one message; 32 hold every token",
    ),
    "fixed sizes of slots": (
        ["--disag.sizes", "fixed", "--disag.capacity", "64", "--disag.combine", "slots"],
        "use sizes='exact'",
    ),
    "dropped rows that ride": (
        ["--disag.sizes", "fixed", "--disag.capacity", "64", "--disag.overflow", "drop", "--disag.residual", "ride"],
        "use overflow='raise' or 'grow'",
    ),
    "a capacity of exact sizes": (["--disag.capacity", "64"], "capacity=64 is for sizes='fixed'"),
    "an overflow of exact sizes": (["--disag.overflow", "drop"], "disag.overflow='drop' is for disag.sizes='fixed'"),
    "a head on F for fixed messages of another size": (
        ["--disag.head", "ffn", "--disag.sizes", "fixed", "--disag.capacity", "64", "--disag.ffn", "1"],
        "use groups of one size or sizes='exact'",
    ),
    "a negative number of weight gradients": (["--disag.weights_held", "-1"], "weights_held=-1 counts units"),
    "an unknown save mode": (["--disag.save", "most"], "disag.save='most' is unknown; use one of input, half, preact, all"),
    "tied embeddings and a head on F": (
        ["--config", "tied", "--disag.head", "ffn"],
        "tied embeddings: the embedding is on A0 and the head on F0",
    ),
    "dense blocks before a head on F": (
        ["--config", "dense_last", "--disag.head", "ffn"],
        "head='ffn' with dense blocks after the last MoE layer (layers.2)",
    ),
    "accumulation over half a batch": (["--training.global_batch_size", "24"], "global_batch_size=24"),
    "sequences longer than the positions": (["--training.seq_len", "8192"], "seq_len=8192 is more than the 4096 positions"),
    "weights on the host": (["--training.enable_cpu_offload"], "training.enable_cpu_offload: a disaggregated run"),
    "compute in another dtype": (["--training.mixed_precision_param", "bfloat16"], "mixed_precision_param='bfloat16' with"),
    "shards that ride": (
        ["--disag.shard_attention", "--disag.residual", "ride"],
        "disag.shard_attention with disag.residual='ride'",
    ),
    "shards of replicas": (["--disag.shard_attention", "--disag.replicas", "2"], "shard_attention with disag.replicas=2"),
    "FSDP by torchtitan's own degree": (["--parallelism.data_parallel_shard_degree", "2"], "disag.shard_attention shards"),
    "validation by a loader that cannot end": (
        ["--config", "validated_without_end", "--validator.enable"],
        "validator.dataloader of NoData.Config has no option 'infinite'",
    ),
    "another parallelism": (["--parallelism.expert_parallel_degree", "2"], "expert_parallel_degree=2"),
    "no data folder": (["--data", "/no/such/folder"], "data folder '/no/such/folder' does not exist"),
    "sequences too long for the text": (["--training.seq_len", "4000"], "one sequence needs 4001"),
}


@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_refused_in_one_sentence(
    name: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, word = CASES[name]
    base = [*([] if "--module" in arguments else MODULE), "--output", str(tmp_path / "out")]
    base += [] if "--data" in arguments else ["--data", text]
    assert word in refused(monkeypatch, capsys, [*base, *arguments])
    assert not (tmp_path / "out").exists()


def test_an_output_folder_that_cannot_be_written_is_refused(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    arguments = [*MODULE, "--config", "cpu_2a2f", "--data", text, "--output", str(tmp_path / "file" / "out")]
    assert "cannot be written" in refused(monkeypatch, capsys, arguments)


@pytest.mark.parametrize(
    "body, error", [("import no_such_package", "no_such_package"), ("from torchmoe import nothing", "nothing")]
)
def test_an_error_inside_a_recipe_is_shown_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, error: str
) -> None:
    name = f"broken_{error}"
    (tmp_path / f"{name}.py").write_text(body + "\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ImportError, match=error):
        launcher.main(["--module", name, "--config", "x"])


def test_a_world_of_another_size_is_named() -> None:
    from torchmoe.errors import ConfigError
    from torchmoe.placement import Placement

    placement = Placement(attention=[2, 2], ffn=[1, 1], num_layers=2, num_experts=8)
    with pytest.raises(ConfigError, match=r"world size 5: attention=\[2, 2\] ffn=\[1, 1\] needs 6"):
        placement.check_world(5)


RUN: dict[str, Any] = {"module": "m", "config": "c", "options": [], "data": None, "steps": 3, "verbose": False}


def test_an_unfinished_run_resumes_and_a_finished_one_is_left_alone(tmp_path: Path) -> None:
    first, unfinished = choose_folder(tmp_path, "name", RUN)
    assert (first.name, unfinished) == ("name", False)
    assert choose_folder(tmp_path, "name", {**RUN, "steps": 9}) == (first, False)  # nothing was trained yet
    choose_folder(tmp_path, "name", RUN)
    History(first).append({"step": 1})
    assert choose_folder(tmp_path, "name", RUN) == (first, True)
    (first / "summary.json").write_text("{}")
    second, unfinished = choose_folder(tmp_path, "name", RUN)
    assert (second.name, unfinished) == ("name-2", False)
    History(second).append({"step": 1})
    assert choose_folder(tmp_path, "name", RUN) == (second, True)
    (second / "summary.json").write_text("{}")
    assert choose_folder(tmp_path, "name", RUN)[0].name == "name-3"
    assert choose_folder(tmp_path, "other", RUN)[0].name == "other"


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    from torchmoe.errors import ConfigError

    with hold(tmp_path), pytest.raises(ConfigError, match="in use by a running job"):
        hold(tmp_path)
    hold(tmp_path).close()


def test_an_unfinished_run_of_other_options_is_not_continued(tmp_path: Path) -> None:
    from torchmoe.errors import ConfigError

    folder, _ = choose_folder(tmp_path, "name", RUN)
    History(folder).append({"step": 1})
    with pytest.raises(ConfigError, match=r"unfinished run with steps=3, this one has 4"):
        choose_folder(tmp_path, "name", {**RUN, "steps": 4})


def test_history_forgets_what_comes_after_the_checkpoint_and_half_a_line(tmp_path: Path) -> None:
    history = History(tmp_path)
    assert history.read() == []
    for step in range(1, 6):
        history.append({"step": step, "loss": 1.0 / step})
    with history.path.open("a") as f:
        f.write('{"step": 6, "lo')
    assert [r["step"] for r in history.read()] == [1, 2, 3, 4, 5]
    history.start_after(3)
    assert [r["step"] for r in history.read()] == [1, 2, 3]
