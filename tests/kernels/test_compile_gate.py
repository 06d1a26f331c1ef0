"""Promises of the compiled kernels, checked without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="the compile gate needs the triton package: pip install 'torchmoe[triton]'")

from benchmarks.compile_gate import Launch, Report, count_nvidia
from benchmarks.kernels import faults
from torchmoe.kernels.tuning import Config

ROOT = Path(__file__).parents[2]


def test_default_configurations_for_sm_90_use_warpgroup_instructions_do_not_spill_and_fit() -> None:
    """In a process of its own: the tests beside this one run Triton's interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.kernels", "--quick"], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for kernel in ("up_projection", "down_projection", "backward_hidden", "input_grad", "weight_grad", "place_pairs", "combine"):
        assert f"sm_90   {kernel} " in done.stdout


KERNEL = SimpleNamespace(fn=SimpleNamespace(__name__="down_projection_kernel"))
CONFIG = Config(128, 128, 64, 8, 8, 4)
ARGUMENTS = {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64, "GROUP_M": 8, "num_warps": 8, "num_stages": 4}
GOOD = Report("down_projection", "sm_90", 110, 0, 4, 4, 131072, 1.0)


@pytest.mark.parametrize(
    ("report", "want"),
    [
        (GOOD, []),
        (replace(GOOD, spills=2), ["spills (2)"]),
        (replace(GOOD, warpgroup_instructions=0), ["no warpgroup instruction"]),
        (replace(GOOD, target="sm_80", warpgroup_instructions=0), []),
        (replace(GOOD, target="sm_80", tensor_core_instructions=0), ["no tensor-core instruction"]),
        (replace(GOOD, shared=140000), ["shared memory 140000 over the tuner's estimate 135168"]),
        (replace(GOOD, target="gfx942", shared=66000), ["shared memory 66000 over the device's 65536"]),
    ],
)
def test_each_rule_of_the_gate_can_fail(report: Report, want: list[str]) -> None:
    launch = Launch(KERNEL, ARGUMENTS)
    assert launch.config == CONFIG
    assert faults(launch, torch.bfloat16, report) == want


def test_spills_and_tensor_core_instructions_are_counted_in_machine_code() -> None:
    code = """
        /*0100*/  HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24 ;
        /*0110*/  HMMA.16816.F32.BF16 R4, R8, R12, R4 ;
        /*0120*/  STL.128 [R1+0x10], R4 ;
        /*0130*/  LDL R5, [R1] ;
        /*0140*/  STG.E desc[UR4][R2.64], R5 ;
        /*0150*/  UTCHMMA gdesc[UR8], gdesc[UR10], tmem[UR4] ;
    """
    assert count_nvidia(code) == (2, 3, 2)
