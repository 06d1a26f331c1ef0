"""Piper: Table IV, parameter counts, MFU arithmetic, ratios, and whether each of its runs fits in memory."""

from __future__ import annotations

from benchmarks.papers.record import Check, Paper, Verdict
from torchmoe.alloc.planner import plan
from torchmoe.alloc.presets import cluster_preset, model_preset
from torchmoe.alloc.specs import Workload
from torchmoe.costs import ModelShape, piper

__all__ = ["checks"]

check = Paper("Piper")

GIB = 2**30
PEAK = 191.5  # TFLOP/s per GCD
# model, E, d, d_f, printed GB per GPU, printed ms
TABLE_IV = (
    ("Switch-Base", 128, 768, 2048, 1.21, 24.2, "GB"),
    ("Mixtral 8x7B", 8, 4096, 14336, 2.63, 52.6, "GiB"),
    ("Mixtral 8x22B", 8, 6144, 16384, 4.50, 90.0, "GiB"),
    ("Grok-1", 8, 6144, 32768, 9.00, 180.0, "GiB"),
    ("GLaM 1.2T", 64, 8192, 32768, 102.88, 2057.6, "GB"),
    ("DeepSeek-V2", 160, 5120, 1536, 7.04, 140.8, "GiB"),
    ("DeepSeek-V3", 256, 7168, 2048, 21.00, 420.0, "GiB"),
)
# figure 12 and 13: TFLOP/s per GPU and the printed MFU
MFU = (
    ("Mixtral 8x7B", 102.8, 53.8),
    ("Mixtral 8x22B", 55.4, 29.0),
    ("Llama-4 Scout", 74.2, 38.8),
    ("Llama-4 Maverick", 37.8, 19.8),
    ("DeepSeek-V2", 46.8, 24.5),
)
WEAK = ((64, 16, 110.0, 45.15), (512, 128, 862.0, 39.38), (1024, 256, 1700.0, 33.04))
# figure 13: size, preset, TFLOP/s of X-MoE and Piper, GPUs
FIGURE_13 = (
    ("10.1B", "xmoe-small", 10.1, 44.0, 90.44, 8),
    ("55.2B", "xmoe-medium", 55.2, 24.20, 57.83, 32),
    ("201.4B", "xmoe-large", 201.4, 24.10, 46.89, 80),
    ("545.4B", "xmoe-super", 545.4, 10.20, 36.96, 512),
)


def _memory_printed() -> list[Check]:
    out = []
    for name, experts, d, width, gb, ms, unit in TABLE_IV:
        moved = piper.migration_bytes(num_experts=experts, dim=d, expert_dim=width)
        value = moved / (1e9 if unit == "GB" else GIB)
        both = f"{moved / 1e9:.2f} GB = {moved / GIB:.2f} GiB"
        out.append(check(f"Table IV {name}, moved per GPU", gb, value, unit=unit, note=both + "; the table mixes both units"))
        seconds = (value * 1e9) / piper.MIGRATION_BANDWIDTH
        out.append(check(f"Table IV {name}, latency at 50 GB/s", ms, seconds * 1e3, unit="ms"))
    return out


def _arithmetic() -> list[Check]:
    out = [check(f"MFU of {name} at {tflops} TFLOP/s", mfu, tflops / PEAK * 100, unit="%") for name, tflops, mfu in MFU]
    for gpus, experts, billions, tflops in WEAK:
        two, three = (
            piper.family_params(dim=5120, expert_dim=20480, num_layers=32, num_experts=experts, matrices=m) / 1e9 for m in (2, 3)
        )
        out.append(
            check(
                f"weak scaling, parameters on {gpus} GPUs (E {experts})",
                billions,
                two,
                unit="B",
                expected="close" if gpus == 1024 else "equal",
                note=f"two matrices per expert; three would be {three:.0f} B; MFU {tflops / PEAK:.1%}",
            )
        )
    out.append(check("weak-scaling efficiency 64 to 1024 GPUs", 73, WEAK[-1][3] / WEAK[0][3] * 100, unit="%"))
    ratios = [p / x for _, _, _, x, p, _ in FIGURE_13]
    out.append(
        check(
            "claim 2-3.5x over X-MoE, smallest",
            2.0,
            min(ratios),
            unit="x",
            expected="close",
            note="from its own figure 13; other numbers of GPUs for X-MoE",
        )
    )
    out.append(
        check("claim 2-3.5x over X-MoE, largest", 3.5, max(ratios), unit="x", expected="close", note="from its own figure 13")
    )
    out.append(check("X-MoE 545B MFU", 5.23, 10.20 / PEAK * 100, unit="%", expected="close", note="10.20 TFLOP/s of figure 13"))
    out.append(check.unknown("claim -45 %", "-45 %", note="the public notes do not say of what: no table or equation gives it"))
    out.append(
        check.unknown(
            "HALO 1.1-9x over RCCL", "printed as bars", note="needs Frontier; emulated nodes: python -m benchmarks.halo"
        )
    )
    return out


def _fits(shape: ModelShape, gpus: int) -> tuple[str, str]:
    """ "fits" or "does not fit" in exact mode, and both modes in words."""
    cluster = cluster_preset(f"frontierx{gpus}")
    w = Workload(seq_len=4096, micro_batch=1, global_batch=4 * gpus, dtype="fp16")
    said = []
    verdict = ""
    for mode in ("exact", "paper"):
        # the printed form keeps s x s scores; one micro-batch per stage in flight is its best case
        report = plan(cluster, shape, w, micro_batches=(1,), memory_model=mode, overlap=("none",), split=False)  # type: ignore[arg-type]
        if report.plans:
            best = report.plans[0]
            c = best.costs
            used = best.memory.total if mode == "exact" else c.paper_memory() + cluster.reserved_bytes
            said.append(
                f"{mode}: PP {c.pp} x EP {c.ep} x DP {c.dp}, {used / GIB:.0f} of 64 GiB, {c.workload.recompute}/{c.workload.save}"
            )
        else:
            said.append(f"{mode}: no strategy fits")
        verdict = verdict or ("fits" if report.plans else "does not fit")
    return verdict, "; ".join(said)


def _feasibility() -> list[Check]:
    out = []
    expected: dict[str, Verdict] = {"xmoe-large": "differs"}
    for size, name, billions, _, _, gpus in FIGURE_13:
        shape = model_preset(name)
        out.append(
            check(
                f"parameters of {name}",
                billions,
                shape.num_params / 1e9,
                unit="B",
                expected="close",
                note="two matrices per expert, no embeddings; shapes as X-MoE prints them",
            )
        )
        verdict, note = _fits(shape, gpus)
        out.append(check(f"run of {size} on {gpus} GPUs", "fits", verdict, expected=expected.get(name, "equal"), note=note))
    for gpus, experts, billions, _ in WEAK:
        shape = ModelShape(
            name=f"weak-{gpus}", num_layers=32, dim=5120, num_heads=40, num_experts=experts, top_k=2, expert_dim=20480, glu=False
        )
        verdict, note = _fits(shape, gpus)
        out.append(check(f"run of {billions:g}B on {gpus} GPUs", "fits", verdict, note=note))
    return out


def checks() -> list[Check]:
    return [*_memory_printed(), *_arithmetic(), *_feasibility()]
