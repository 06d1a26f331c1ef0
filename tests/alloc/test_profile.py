"""The platform profile: fits against known curves, a round trip, refusals, and a short real measurement."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchmoe.__main__ import main
from torchmoe.alloc.fit import errors, fit_kernel, fit_link
from torchmoe.alloc.measure import messages
from torchmoe.alloc.presets import cluster_preset
from torchmoe.alloc.profile import Profile, _kernel_fit, _link_fit, profile
from torchmoe.alloc.specs import Efficiency
from torchmoe.errors import ConfigError
from torchmoe.testing.ranks import RankContext, run_ranks


@given(st.floats(0, 1e-3), st.floats(1e6, 1e12))
def test_latency_and_bandwidth_are_recovered(latency: float, bandwidth: float) -> None:
    sizes = [float(1 << i) for i in range(8, 28, 3)]
    c = fit_link({s: latency + s / bandwidth for s in sizes})
    for s in (300.0, 1e5, 1e8):
        assert c.affine(s) == pytest.approx(latency + s / bandwidth, rel=1e-3)
    for s in sizes:
        assert c.seconds(s) == pytest.approx(latency + s / bandwidth, rel=1e-3)
    assert c.seconds(4 * sizes[-1]) == pytest.approx(4 * c.seconds(sizes[-1]))


@given(st.lists(st.floats(1e-6, 1e-1), min_size=2, max_size=12))
def test_a_larger_message_never_takes_less_time(seconds: list[float]) -> None:
    """Against the definition: the rising sequence with the least squared difference of logarithms, by its min-max formula."""
    c = fit_link({float(1 << i): t for i, t in enumerate(seconds)})
    y = [math.log(t) for t in seconds]
    n = len(y)
    for i, (_, t) in enumerate(c.points):
        mean = max(min(sum(y[a : b + 1]) / (b + 1 - a) for b in range(i, n)) for a in range(i + 1))
        assert math.log(t) == pytest.approx(mean, abs=1e-9)


def test_degenerate_links_do_not_invent_numbers() -> None:
    assert fit_link({10.0: 1.0, 1000.0: 1.0}).bandwidth == math.inf  # all latency
    assert fit_link({10.0: 2.0, 1000.0: 1.0}).affine(5) == pytest.approx(1.5)  # falling times: no bandwidth in them
    c = fit_link({1e3: 1e-6, 2e3: 2.5e-6, 4e3: 6e-6})  # convex: a negative latency is not believed
    assert c.latency == 0 and c.bandwidth > 0
    with pytest.raises(ConfigError, match="1 message sizes"):
        fit_link({1.0: 1.0})
    for bad in (math.nan, math.inf, 0.0, -1.0):
        with pytest.raises(ConfigError, match=f"{bad} s for 1000.0 bytes"):
            fit_link({10.0: 1.0, 1000.0: bad})


def saturating(size: float) -> tuple[float, float]:
    """FLOPs and seconds of a kernel with overhead: share = size / (size + 300) of 1e12."""
    flops = 1e9 * size
    return flops, flops / (1e12 * size / (size + 300))


def test_shares_between_measured_sizes_are_exact_for_powers() -> None:
    """A kernel that is all overhead: attention of one time for any length has a share that grows with its square."""
    share, _ = _kernel_fit("attention 64", {float(1 << i): (4.0**i, 1e-3) for i in range(5, 10)}, 4.0**9 / 1e-3)
    assert share(100.0) == pytest.approx((100 / 512) ** 2)


def test_kernel_curves_hold_on_sizes_kept_out() -> None:
    """The promise of the command (median <= 10 %) on a kernel that saturates, sizes in doublings as it measures them."""
    measured = {float(1 << i): saturating(1 << i) for i in range(5, 14)}
    share, fit = _kernel_fit("gemm", measured, 1e12)
    assert fit.held_out == 4 and fit.median <= 0.10 and fit.p90 <= 0.15
    assert share(512.0) == pytest.approx(512 / 812)
    with pytest.raises(ConfigError, match="not within the peak"):
        fit_kernel(measured, peak=1e11)


def test_link_fits_state_their_error_on_sizes_kept_out() -> None:
    exact = {1 << i: 1e-5 + (1 << i) / 1e9 for i in range(10, 24, 2)}
    assert _link_fit("p2p", exact)[1].median < 0.15 and "these two alone: 0%" in _link_fit("p2p", exact)[1].text
    bent = {s: t * (3 if i % 2 else 1) for i, (s, t) in enumerate(sorted(exact.items()))}
    assert _link_fit("p2p", bent)[1].median == pytest.approx(2 / 3, rel=0.1)
    assert errors([(1.1, 1.0), (1.0, 1.0), (0.5, 1.0)]) == (pytest.approx(0.1), pytest.approx(0.5))
    with pytest.raises(ConfigError, match="kept out"):
        errors([])


@pytest.fixture(scope="module")
def measured() -> Profile:
    return profile(device="cpu", quick=True)


def test_a_real_profile_is_complete_and_is_read_by_the_planner(measured: Profile, tmp_path: Path) -> None:
    assert set(measured.kernels) == {"attention 64", "gemm", "grouped_gemm"}
    assert {f.name for f in measured.fits} == set(measured.kernels)
    assert all(f.held_out >= 2 and 0 <= f.median <= f.p90 for f in measured.fits)
    path = tmp_path / "platform.json"
    measured.save(path)
    again = Profile.load(path)
    assert replace(again, environment=measured.environment) == measured
    cluster = replace(cluster_preset("h800x8"), gpu=replace(cluster_preset("h800x8").gpu, peak_flops={"fp32": 2 * measured.peak}))
    applied = again.apply(cluster)
    assert applied.gpu.gemm(1e9) == pytest.approx(measured.kernels["gemm"](1e9) / 2)
    assert "measured on" in applied.gpu.source


def test_attention_of_the_nearest_head_dimension_is_used(measured: Profile) -> None:
    wide = replace(measured, kernels={**measured.kernels, "attention 128": Efficiency.constant(0.5)})
    cluster = replace(cluster_preset("h800x8"), gpu=replace(cluster_preset("h800x8").gpu, peak_flops={"fp32": 2 * measured.peak}))
    assert wide.apply(cluster, head_dim=192).gpu.attention(4096) == 0.25
    assert wide.apply(cluster, head_dim=80).gpu.attention(64) == pytest.approx(measured.kernels["attention 64"](64) / 2)


def messages_on_a_rank(ctx: RankContext) -> dict[str, dict[float, float]]:
    return messages(torch.device("cpu"), sizes=[1024, 65536], rounds=2)


def test_messages_are_timed_by_group_and_size() -> None:
    for found in run_ranks(messages_on_a_rank, 4, backend="gloo"):
        assert set(found) == {"all_to_all 2", "all_to_all 4", "m2n", "p2p"}
        assert all(set(t) == {1024.0, 65536.0} and min(t.values()) > 0 for t in found.values())


def test_another_devices_or_damaged_profile_is_refused(measured: Profile, tmp_path: Path) -> None:
    cluster = cluster_preset("h800x8")
    with pytest.raises(ConfigError, match="more than the peak"):
        replace(measured, peak=1e20).apply(cluster)
    with pytest.raises(ConfigError, match="the profile is for int3"):
        replace(measured, dtype="int3").apply(cluster)
    good = measured.to_dict()
    for change, text in (
        ({"torchmoe_profile": 1}, "version 2"),
        ({"kernels": {}}, "damaged"),
        ({"links": {"p2p": 3}}, "damaged"),
        ({"peak": None}, "damaged"),
    ):
        path = tmp_path / "bad.json"
        path.write_text(json.dumps({**good, **change}))
        with pytest.raises(ConfigError, match=text):
            Profile.load(path)
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="sees no GPU"):
            profile(device="cuda")
    with pytest.raises(ConfigError, match="device='tpu'"):
        profile(device="tpu")
    with pytest.raises(ConfigError, match="dtype='int3'"):
        profile(device="cpu", dtype="int3")


def test_the_command_writes_what_it_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torchmoe.alloc.profile as module

    known = {float(1 << i): saturating(1 << i) for i in range(5, 12)}
    fits = {k: _kernel_fit(k, known, 1e12) for k in ("attention 64", "gemm", "grouped_gemm")}
    fake = Profile("test", "bf16", 1e12, {k: e for k, (e, _) in fits.items()}, {}, tuple(f for _, f in fits.values()))
    monkeypatch.setattr(module, "profile", lambda **_: fake)
    out = tmp_path / "p.json"
    assert main(["profile", "--out", str(out)]) == 0
    text = capsys.readouterr().out
    assert "median error" in text and "p90 error" in text and str(out) in text
    line = ["plan", "--cluster", "h200x8", "--model", "qwen3-30b", "--batch", "64", "--profile", str(out)]
    assert main(line) == 0
    assert "measured on test in bf16" in capsys.readouterr().out
