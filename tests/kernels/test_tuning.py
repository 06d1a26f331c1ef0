"""Promises of the choice of tile configurations."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchmoe.errors import ConfigError
from torchmoe.kernels.tuning import (
    KERNELS,
    SLACK,
    SMALLEST,
    Config,
    Device,
    Key,
    Tuner,
    candidates,
    default_config,
    fits,
    mode,
    rows_bucket,
    shared_memory_bytes,
)

ARCHITECTURES = ("sm_90", "sm_100", "gfx942", "default")
LIMITS = {"sm_90": 232448, "sm_100": 232448, "gfx942": 65536, "default": 101376}
KEYS = [
    Key(kernel, width, 2048, 128, size, bucket)
    for kernel in KERNELS
    for width in (768, 47)
    for size in (2, 4)
    for bucket in (0, 3, 6, 12)
]
CPU = torch.device("cpu")
CARD = Device("Test card", "sm_90", 232448, can_measure=True)


class Bench:
    """Pretends to measure: a configuration costs block_m, and those in ``broken`` cannot run."""

    def __init__(self, broken: tuple[Config, ...] = ()) -> None:
        self.runs: list[Config] = []
        self.broken = broken

    def start(self, config: Config) -> None:
        self.runs.append(config)
        if config in self.broken:
            raise RuntimeError("out of resources")

    def measure(self, call: Callable[[], None]) -> float:
        call()
        return float(self.runs[-1].block_m)

    def tuner(self, folder: Path, how: str) -> Tuner:
        return Tuner(folder, how, self.measure, lambda device: CARD)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("key", KEYS, ids=Key.text)
def test_every_key_has_at_most_eight_candidates_and_a_default_that_fits(key: Key, architecture: str) -> None:
    """woct0rdho/transformers-qwen3-moe-fused PR#21: hundreds of configurations read as a hang."""
    found = candidates(key, architecture)
    assert 1 <= len(found) <= 8
    assert len(set(found)) == len(found)
    assert default_config(key, LIMITS[architecture], architecture) == found[0]
    for config in found:
        assert min(config.block_m, config.block_n, config.block_k) >= 16
        for size in (config.block_m, config.block_n, config.block_k, config.num_warps):
            assert size & (size - 1) == 0


def test_tables_name_only_known_kernels() -> None:
    tables = json.loads(files("torchmoe.kernels").joinpath("configs.json").read_text())["architectures"]
    for group in tables.values():
        names = {name for table in group.values() for name in table} if isinstance(group, dict) else set()
        assert names <= {*KERNELS, "any"}


def test_unknown_architectures_use_the_default_table() -> None:
    assert candidates(KEYS[0], "sm_86") == candidates(KEYS[0], "default")


@given(st.integers(1, 10**7), st.integers(1, 1024))
def test_a_key_knows_only_the_magnitude_of_rows_per_expert(rows: int, experts: int) -> None:
    bucket = rows_bucket(rows, experts)
    mean = max(rows // experts, 1)
    assert 2**bucket <= mean < 2 ** (bucket + 1)


def test_configurations_that_need_too_much_shared_memory_are_left_out() -> None:
    key = Key("down_projection", 2048, 768, 128, 2, 11)
    first = candidates(key, "sm_90")[0]
    need = shared_memory_bytes(key.kernel, first, 2) + SLACK
    assert default_config(key, need, "sm_90") == first
    assert default_config(key, need - 1, "sm_90") != first
    assert fits(key.kernel, default_config(key, 100_000, "sm_90"), 2, 100_000)
    assert default_config(key, 20_000, "sm_90") == SMALLEST


def test_one_clear_error_if_nothing_fits() -> None:
    with pytest.raises(ConfigError, match=r"input_grad: the smallest tile needs \d+ bytes of shared memory, the device has 1000"):
        default_config(Key("input_grad", 8, 8, 2, 2, 3), 1000)


def test_nothing_is_measured_unless_asked_for(tmp_path: Path) -> None:
    bench = Bench()
    for how in ("off", "cached"):
        assert bench.tuner(tmp_path, how).config(KEYS[0], CPU, bench.start) == candidates(KEYS[0], "sm_90")[0]
    assert not bench.runs
    assert not list(tmp_path.iterdir())


def test_tuning_picks_the_fastest_says_so_and_is_done_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """fla-org/flash-linear-attention#533, PR#598: tuned again by every process; here the second one measures nothing."""
    key, bench = Key("up_projection", 768, 2048, 128, 2, 11), Bench()
    with caplog.at_level(logging.WARNING):
        best = bench.tuner(tmp_path, "on").config(key, CPU, bench.start)
    assert best.block_m == min(config.block_m for config in candidates(key, "sm_90"))
    assert key.text() in caplog.text
    assert sorted(map(repr, bench.runs)) == sorted(map(repr, candidates(key, "sm_90")))
    second = Bench()
    assert second.tuner(tmp_path, "on").config(key, CPU, second.start) == best
    assert second.tuner(tmp_path, "cached").config(key, CPU, second.start) == best
    assert second.tuner(tmp_path, "off").config(key, CPU, second.start) == candidates(key, "sm_90")[0]
    assert not second.runs


def test_a_choice_never_changes_inside_a_process(tmp_path: Path) -> None:
    """Forward and recompute must run the same configuration."""
    key, bench = Key("up_projection", 768, 2048, 128, 2, 11), Bench()
    tuner = bench.tuner(tmp_path, "cached")
    before = tuner.config(key, CPU, bench.start)
    bench.tuner(tmp_path, "on").config(key, CPU, bench.start)
    assert tuner.config(key, CPU, bench.start) == before


def test_a_configuration_that_cannot_run_is_no_candidate(tmp_path: Path) -> None:
    key = Key("up_projection", 768, 2048, 128, 2, 11)
    found = candidates(key, "sm_90")
    bench = Bench(broken=found[1:])
    assert bench.tuner(tmp_path, "on").config(key, CPU, bench.start) == found[0]
    bench = Bench(broken=found)
    assert bench.tuner(tmp_path / "other", "on").config(key, CPU, bench.start) == found[0]


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"x": [1, 2]}', '{"x": 3}'])
def test_a_damaged_cache_is_ignored_with_a_warning(tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "Test_card.json").write_text(content)
    bench = Bench()
    assert bench.tuner(tmp_path, "cached").config(KEYS[0], CPU, bench.start) == candidates(KEYS[0], "sm_90")[0]
    assert "ignored" in caplog.text


def test_a_cached_configuration_that_does_not_fit_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "Test_card.json").write_text(json.dumps({KEYS[0].text(): [256, 256, 128, 8, 8, 5]}))
    bench = Bench()
    assert bench.tuner(tmp_path, "cached").config(KEYS[0], CPU, bench.start) == candidates(KEYS[0], "sm_90")[0]


def test_autotune_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, want in {"": "cached", "0": "off", "1": "on"}.items():
        monkeypatch.setenv("TORCHMOE_AUTOTUNE", value)
        assert mode() == want
    monkeypatch.setenv("TORCHMOE_AUTOTUNE", "yes")
    with pytest.raises(ConfigError, match="TORCHMOE_AUTOTUNE='yes' is unknown; use 0"):
        mode()


@pytest.mark.parametrize("config", [Config(128, 256, 64, 8, 8, 3), Config(16, 64, 64, 8, 4, 3), Config(64, 32, 32, 8, 4, 3)])
def test_an_epilogue_part_keeps_a_whole_number_of_columns(config: Config) -> None:
    parts = config.parts
    assert parts in (1, 2, 4)
    assert config.block_n // parts >= 16
