"""Shims do what torchtitan needs here, once, and nothing where it is not needed."""

from __future__ import annotations

import inspect
import sys
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from torchmoe.errors import ConfigError
from torchmoe.titan import shims


def test_ensure_twice_changes_nothing_more() -> None:
    shims.ensure()
    from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

    before = (dist.set_timeout, PipelineScheduleSingle.step, PipelineScheduleMulti.step)
    shims.ensure()
    assert before == (dist.set_timeout, PipelineScheduleSingle.step, PipelineScheduleMulti.step)
    assert "arg_mbs" in inspect.signature(PipelineScheduleSingle.step).parameters


@pytest.mark.skipif(torch.accelerator.is_available(), reason="the device is rebound only on hosts without an accelerator")
def test_every_torchtitan_module_sees_the_cpu() -> None:
    shims.ensure()
    from torchtitan.tools import utils

    assert utils.device_type == "cpu"
    for name, module in list(sys.modules.items()):
        if name.startswith("torchtitan") and module is not None:
            assert vars(module).get("device_type") in (None, "cpu"), name
    assert utils.device_module.get_device_properties().total_memory > 0
    assert utils.device_module.memory_stats()["active_bytes.all.peak"] > 0


def test_nothing_is_rebound_on_an_accelerator() -> None:
    shims.ensure()
    with mock.patch.object(torch.accelerator, "is_available", lambda: True), mock.patch.object(shims, "_enable_cpu") as enable:
        shims.ensure()
        assert not enable.called

        def parallelize(model: object) -> object:
            return model

        assert shims.gloo_safe(parallelize) is parallelize


@pytest.mark.parametrize(
    "patch, word",
    [
        (mock.patch.object(torch, "__version__", "2.11.0"), "torch >= 2.13"),
        (mock.patch("importlib.metadata.version", lambda name: "0.2.2"), "0.3.0"),
        (mock.patch("importlib.util.find_spec", lambda name: None), "triton"),
    ],
)
def test_missing_or_old_packages_are_named(patch: object, word: str) -> None:
    with patch, pytest.raises(ConfigError, match=word):  # type: ignore[attr-defined]
        shims.ensure()


def test_the_spmd_backend_follows_torch() -> None:
    for version, want in (("2.13.0", "partial_dtensor"), ("2.14.1", "spmd_types"), ("3.0.0", "spmd_types")):
        with mock.patch.object(torch, "__version__", version):
            assert shims.spmd_backend() == want
