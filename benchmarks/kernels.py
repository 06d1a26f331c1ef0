"""Compile every kernel for GPUs that are not here and check the machine code: `python -m benchmarks.kernels [--quick]`.

--quick: the default configurations for sm_90. Without it: every configuration for sm_80, sm_90, sm_100 and gfx942, and the
table of registers, tensor-core instructions and shared memory is written to benchmarks/results/kernels.md.

The gate: no kernel spills; a grouped GEMM in half precision uses the tensor cores, on sm_90 and sm_100 by warpgroup
instructions (HGMMA, tcgen05) from 64 rows a tile on; shared memory fits the device and what the tuner assumes.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks.compile_gate import SHARED_LIMIT, TARGETS, Launch, Report, compile_launch, launches, specialise
from benchmarks.shapes import ExpertShape
from torchmoe.kernels.tuning import KERNELS, SLACK, Config, Key, candidates, rows_bucket, shared_memory_bytes

RESULTS = Path(__file__).parent / "results"
QWEN3 = ExpertShape("qwen3_30b", 32768, 2048, 768, 128, 8)
GPT_OSS = ExpertShape("gpt_oss_20b", 32768, 2880, 2880, 32, 4, "clamped_swiglu", True)
SOME = ExpertShape("qwen3_30b_T1024", 1024, 2048, 768, 128, 8)
FEW = ExpertShape("qwen3_30b_T64", 64, 2048, 768, 128, 8)
ODD = ExpertShape("odd_widths", 4096, 97, 47, 7, 3, "geglu")
PLAIN = ExpertShape("scatter_silu", 16384, 4096, 1024, 64, 8, "silu")
ONE_WIDE = ExpertShape("width_1", 4096, 1, 1, 7, 3)
ONE_EXPERT = ExpertShape("one_expert", 8192, 2048, 768, 1, 1)
THOUSAND = ExpertShape("1024_experts", 32768, 2048, 768, 1024, 8)
EXTREMES = (ODD, ONE_WIDE, ONE_EXPERT, THOUSAND)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Case:
    """One compilation: the ``nth`` launch of a kernel in a layer of this shape, with one configuration forced or None."""

    shape: ExpertShape
    dtype: str
    target: str
    name: str
    nth: int
    config: Config | None = None

    def launch(self) -> Launch:
        """The recorded launch."""
        forced = {self.name: self.config} if self.config is not None else {}
        recorded = launches(self.shape, DTYPES[self.dtype], self.target, forced)
        return [launch for launch in recorded if launch.name == self.name][self.nth]


@dataclass(frozen=True)
class Row:
    """A compiled case and the rules it breaks."""

    shape: str
    dtype: str
    config: list[int] | None
    report: Report
    faults: list[str]


def cases(quick: bool) -> Iterator[Case]:
    """What to compile, without repetitions of the same specialisation."""
    seen: set[str] = set()
    plans = [("bf16", "sm_90", shape) for shape in (QWEN3, GPT_OSS, SOME, FEW)]
    if not quick:
        plans += [("bf16", "sm_90", PLAIN)]
        plans += [("bf16", t, s) for t in TARGETS if t != "sm_90" for s in (QWEN3, SOME, FEW)]
        plans += [(d, t, QWEN3) for t in TARGETS for d in ("fp16", "fp32")]
        plans += [("bf16", t, s) for t in TARGETS for s in EXTREMES]
        plans += [("fp16", "sm_90", ODD)]
    for dtype, target, shape in plans:
        count: Counter[str] = Counter()
        for launch in launches(shape, DTYPES[dtype], target):
            if launch.name not in KERNELS and (dtype != "bf16" or shape is PLAIN):
                continue  # the small kernels differ little between these
            choices: list[Config | None] = [None]
            if not quick and launch.name in KERNELS and shape in (QWEN3, SOME, FEW) and dtype != "fp16":
                choices += [config for config in _table(launch.name, shape, dtype, target) if config != launch.config]
            for config in choices:
                case = Case(shape, dtype, target, launch.name, count[launch.name], config)
                key = f"{target} {launch.name} {specialise(case.launch())} {case.launch().options}"
                if key not in seen:
                    seen.add(key)
                    yield case
            count[launch.name] += 1


def run(case: Case) -> Row:
    """Compile one case and judge it."""
    launch = case.launch()
    report = compile_launch(launch, case.target)
    shown = list(asdict(launch.config).values()) if launch.name in KERNELS else None
    return Row(case.shape.name, case.dtype, shown, report, faults(launch, DTYPES[case.dtype], report))


def faults(launch: Launch, dtype: torch.dtype, report: Report) -> list[str]:
    """The rules of the gate that a compiled launch breaks."""
    found = []
    if report.spills:
        found.append(f"spills ({report.spills})")
    if report.shared > SHARED_LIMIT[report.target]:
        found.append(f"shared memory {report.shared} over the device's {SHARED_LIMIT[report.target]}")
    if launch.name in KERNELS:
        estimate = shared_memory_bytes(launch.name, launch.config, dtype.itemsize) + SLACK
        if report.shared > estimate:
            found.append(f"shared memory {report.shared} over the tuner's estimate {estimate}")
        half = dtype.itemsize == 2  # fp32 products are exact by default and have no tensor core
        if half and not report.tensor_core_instructions:
            found.append("no tensor-core instruction")
        if half and report.target in ("sm_90", "sm_100") and launch.config.block_m >= 64 and not report.warpgroup_instructions:
            found.append("no warpgroup instruction")
    return found


def _table(kernel: str, shape: ExpertShape, dtype: str, target: str) -> tuple[Config, ...]:
    key = Key(kernel, shape.F, shape.D, shape.E, DTYPES[dtype].itemsize, rows_bucket(shape.T * shape.K, shape.E))
    return candidates(key, target)


def _markdown(rows: list[Row], version: str) -> str:
    lines = [
        f"# Compiled kernels, Triton {version}",
        "",
        "Written by `python -m benchmarks.kernels`. Compiled without a GPU; nothing here was run. The configuration is",
        "block_m, block_n, block_k, group_m, warps, stages. Spills: STL and LDL instructions, on gfx942 spilled registers.",
        "",
        "| target | kernel | shape | dtype | configuration | registers | spills | tensor-core | of a warpgroup | shared bytes |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        r, config = row.report, " ".join(map(str, row.config)) if row.config else ""
        lines.append(
            f"| {r.target} | {r.name} | {row.shape} | {row.dtype} | {config} | {r.registers} | {r.spills} "
            f"| {r.tensor_core_instructions} | {r.warpgroup_instructions} | {r.shared} |"
        )
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> int:
    """Returns 1 if a rule is broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="default configurations for sm_90 alone")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--workers", type=int, default=min(2, os.cpu_count() or 1))
    options = parser.parse_args(arguments)
    import triton

    started = time.perf_counter()
    rows: list[Row] = []
    with ProcessPoolExecutor(options.workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        for row in pool.map(run, list(cases(options.quick))):
            rows.append(row)
            r = row.report
            print(
                f"{r.target:7} {r.name:16} {row.shape:16} {row.dtype} {row.config or ''!s:28} registers {r.registers:3} "
                f"spills {r.spills} tensor-core {r.tensor_core_instructions} shared {r.shared} {', '.join(row.faults)}",
                flush=True,
            )
    if options.json:
        content = {"triton": triton.__version__, "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(content, indent=1))
    if not options.quick:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "kernels.md").write_text(_markdown(rows, triton.__version__))
    broken = [row for row in rows if row.faults]
    for row in broken:
        print(f"BROKEN {row.report.target} {row.report.name} {row.shape} {row.config}: {', '.join(row.faults)}")
    verdict = f"{len(broken)} of {len(rows)} compilations break a rule" if broken else f"{len(rows)} compilations keep all rules"
    highest = max(row.report.registers for row in rows)
    targets = ", ".join(target for target in TARGETS if any(row.report.target == target for row in rows))
    seconds = time.perf_counter() - started
    print(f"kernels: {verdict} ({targets}; at most {highest} registers, Triton {triton.__version__}, {seconds:.0f} s)")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
