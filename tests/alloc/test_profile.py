"""The platform profile: fits against known curves, a round trip, refusals, and a short real measurement."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchmoe.__main__ import main
from torchmoe.alloc.fit import errors, fit_kernel, fit_link
from torchmoe.alloc.presets import cluster_preset
from torchmoe.alloc.profile import Profile, _kernel_fit, _link_fit, profile
from torchmoe.errors import ConfigError


@given(st.floats(0, 1e-3), st.floats(1e6, 1e12))
def test_latency_and_bandwidth_are_recovered(latency: float, bandwidth: float) -> None:
    sizes = [float(1 << i) for i in range(8, 28, 3)]
    c = fit_link({s: latency + s / bandwidth for s in sizes})
    for s in (300.0, 1e5, 1e8):
        assert c.seconds(s) == pytest.approx(latency + s / bandwidth, rel=1e-3)


def test_degenerate_links_do_not_invent_numbers() -> None:
    assert fit_link({10.0: 1.0, 1000.0: 1.0}).bandwidth == math.inf  # all latency
    assert fit_link({10.0: 2.0, 1000.0: 1.0}).seconds(5) == pytest.approx(1.5)  # falling times: no bandwidth in them
    c = fit_link({1e3: 1e-6, 2e3: 2.5e-6, 4e3: 6e-6})  # convex: a negative latency is not believed
    assert c.latency == 0 and c.bandwidth > 0
    with pytest.raises(ConfigError, match="1 message sizes"):
        fit_link({1.0: 1.0})


def saturating(size: float) -> tuple[float, float]:
    """FLOPs and seconds of a kernel with overhead: share = size / (size + 300) of 1e12."""
    flops = 1e9 * size
    return flops, flops / (1e12 * size / (size + 300))


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
    assert _link_fit("p2p", exact)[1].median < 1e-6
    bent = {s: t * (3 if i % 2 else 1) for i, (s, t) in enumerate(sorted(exact.items()))}
    assert _link_fit("p2p", bent)[1].median == pytest.approx(2 / 3, rel=0.01)
    assert errors([(1.1, 1.0), (1.0, 1.0), (0.5, 1.0)]) == (pytest.approx(0.1), pytest.approx(0.5))
    with pytest.raises(ConfigError, match="kept out"):
        errors([])


@pytest.fixture(scope="module")
def measured() -> Profile:
    return profile(device="cpu", quick=True)


def test_a_real_profile_is_complete_and_is_read_by_the_planner(measured: Profile, tmp_path: Path) -> None:
    assert set(measured.kernels) == {"attention", "gemm", "grouped_gemm"}
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


def test_another_devices_or_damaged_profile_is_refused(measured: Profile, tmp_path: Path) -> None:
    cluster = cluster_preset("h800x8")
    with pytest.raises(ConfigError, match="more than the peak"):
        replace(measured, peak=1e20).apply(cluster)
    with pytest.raises(ConfigError, match="the profile is for int3"):
        replace(measured, dtype="int3").apply(cluster)
    good = measured.to_dict()
    for change, text in (
        ({"torchmoe_profile": 0}, "version 1"),
        ({"kernels": {}}, "damaged"),
        ({"links": {"p2p": 3}}, "damaged"),
        ({"peak": None}, "damaged"),
    ):
        path = tmp_path / "bad.json"
        path.write_text(json.dumps({**good, **change}))
        with pytest.raises(ConfigError, match=text):
            Profile.load(path)
    with pytest.raises(ConfigError, match="device='tpu'"):
        profile(device="tpu")
    with pytest.raises(ConfigError, match="dtype='int3'"):
        profile(device="cpu", dtype="int3")


def test_the_command_writes_what_it_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torchmoe.alloc.profile as module

    known = {float(1 << i): saturating(1 << i) for i in range(5, 12)}
    fits = {k: _kernel_fit(k, known, 1e12) for k in ("attention", "gemm", "grouped_gemm")}
    fake = Profile("test", "bf16", 1e12, {k: e for k, (e, _) in fits.items()}, {}, tuple(f for _, f in fits.values()))
    monkeypatch.setattr(module, "profile", lambda **_: fake)
    out = tmp_path / "p.json"
    assert main(["profile", "--out", str(out)]) == 0
    text = capsys.readouterr().out
    assert "median error" in text and "p90 error" in text and str(out) in text
    line = ["plan", "--cluster", "h200x8", "--model", "qwen3-30b", "--batch", "64", "--profile", str(out)]
    assert main(line) == 0
    assert "measured on test in bf16" in capsys.readouterr().out
