"""The published formulas against values computed by hand (papers.md 1.3, 1.6, 2.4, 2.9, 3.3, 3.7)."""

from __future__ import annotations

import pytest

from torchmoe.costs import disagmoe, moeblaze, piper
from torchmoe.errors import ConfigError

MIB, GIB = 2**20, 2**30


@pytest.mark.parametrize(
    ("dim", "g", "k", "width", "values", "ffn"),
    [
        (4096, 16, 8, 1536, (1568, 2592, 4640, 8736), 3072),
        (2880, 8, 4, 2880, (2858, 4906, 9002, 17194), 5760),
        (2048, 1, 4, 1408, (3072, 5120, 9216, 17408), 2816),
    ],
)
def test_disagmoe_intensities(dim: int, g: int, k: int, width: int, values: tuple[int, ...], ffn: int) -> None:
    got = [disagmoe.intensity_attention(dim=dim, gqa_group=g, seq_len=s * 1024, top_k=k) for s in (4, 8, 16, 32)]
    assert [round(v) for v in got] == list(values)
    assert disagmoe.intensity_ffn(expert_dim=width) == ffn


def test_disagmoe_turning_points() -> None:
    point = disagmoe.turning_point(peak_flops=989e12, bandwidth=50e9)
    assert round(point) == 19780
    assert round(disagmoe.turning_point(peak_flops=989e12, bandwidth=400e9), 1) == 2472.5
    a, f = disagmoe.disaggregated_turning_points(point, m=16, n=10)
    assert a / point == pytest.approx(1.2308, abs=1e-4)
    assert f / point == pytest.approx(0.7692, abs=1e-4)
    assert a + f == pytest.approx(2 * point)
    with pytest.raises(ConfigError, match="bandwidth=0"):
        disagmoe.turning_point(peak_flops=1, bandwidth=0)


def test_disagmoe_bubble_is_a_quarter() -> None:
    for t_comm in (0.1, 1.0, 3.0):
        base = disagmoe.bubble_base(pp=8, v=4, layers_per_stage=1, t_a=1, t_f=1, t_a2a=t_comm, t_p2p=0)
        assert disagmoe.bubble_af(pp=8, v=4, t_a=1, t_f=1, t_m2n=t_comm) / base == pytest.approx(0.25)


def test_disagmoe_balance_table() -> None:
    """distributed.md 2.4: the calibration to Figure 6a, colocated times and the even split."""
    case = disagmoe.calibrate_balance({4: (28.38, 19.22, 1.08, 0.73), 32: (50.26, 13.96, 2.78, 0.77)})
    assert (case.a1, case.a2, case.f1, case.c1) == pytest.approx((5.637, 0.3645, 4.805, 6.575), abs=1e-3)
    for s, colocated, even in ((4, 100.2, 56.8), (8, 212.1, 136.8), (16, 470.8, 367.0), (32, 1128.2, 1107.3)):
        assert disagmoe.colocated_time(case, s) == pytest.approx(colocated, abs=0.1)
        split = disagmoe.split_times(case, s, world=32, m=16, n=16, nics_a=16, nics_f=16)
        assert split.stage == pytest.approx(even, abs=0.2)
    with pytest.raises(ConfigError, match="1 sequence lengths"):
        disagmoe.calibrate_balance({4: (1, 1, 1, 1)})
    with pytest.raises(ConfigError, match="nics_a=0"):
        disagmoe.split_times(case, 4, world=4, m=2, n=2, nics_a=0, nics_f=4)


def test_piper_memory_by_hand() -> None:
    """d 2, L 4, E 8, k 2, H 1, d_f 3, b 4, s 5: every term small enough to write down."""
    m = piper.PiperModel(dim=2, num_layers=4, num_experts=8, top_k=2, num_heads=1, expert_dim=3, batch=4, seq_len=5)
    attention, expert = 64 * 4, 48 * 2 * 3
    act_a, act_e = 12 * 4 * 5 * 2 + 4 * 4 * 1 * 25, 2 * 4 * 5 * 2 * (9 + 2)
    assert piper.memory_unsharded(m) == 4 * (attention + 8 * expert + act_a + act_e)
    assert piper.memory_edp(m, ep=4) == 4 * (attention + 2 * expert + act_a + act_e / 4)
    live = act_a / 2 + act_e / 8
    for i in range(2):
        assert piper.memory_1f1b(m, pp=2, ep=4, micro_batches=2, stage=i) == 2 * (attention + 2 * expert + (2 - i) * live)
    first, last = (piper.memory_1f1b(m, pp=2, ep=4, micro_batches=2, stage=i) for i in (0, 1))
    assert first - last == piper.memory_spread(m, pp=2, ep=4, micro_batches=2) == 4 * 0.5 * live
    assert piper.exchange_time_bound(m, ep=4, nic_bandwidth=10) == 4 * 4 * 5 * 2 * 2 / 40
    with pytest.raises(ConfigError, match="stage=2"):
        piper.memory_1f1b(m, pp=2, ep=4, micro_batches=2, stage=2)


@pytest.mark.parametrize(
    ("experts", "dim", "width", "published", "unit", "ms"),
    [
        (128, 768, 2048, 1.21, 1e9, 24.2),
        (8, 4096, 14336, 2.63, GIB, 52.6),
        (8, 6144, 16384, 4.50, GIB, 90.0),
        (8, 6144, 32768, 9.00, GIB, 180.0),
        (160, 5120, 1536, 7.04, GIB, 140.8),
        (256, 7168, 2048, 21.00, GIB, 420.0),
    ],
)
def test_piper_table_iv(experts: int, dim: int, width: int, published: float, unit: float, ms: float) -> None:
    got = piper.migration_bytes(num_experts=experts, dim=dim, expert_dim=width) / unit
    assert got == pytest.approx(published, rel=0.003)
    assert got * 1e9 / piper.MIGRATION_BANDWIDTH * 1e3 == pytest.approx(ms, rel=0.003)


def test_piper_weak_scaling_parameters_have_two_matrices() -> None:
    for experts, billions in ((16, 110.7), (128, 862.3), (256, 1721)):
        n = piper.family_params(dim=5120, expert_dim=20480, num_layers=32, num_experts=experts, matrices=2)
        assert n / 1e9 == pytest.approx(billions, rel=0.001)


def test_moeblaze_index_and_saved_bytes() -> None:
    confs = [(65536, 512, 4, 1), (65536, 1024, 8, 2), (65536, 1024, 16, 4), (32768, 2048, 16, 4), (32768, 512, 16, 4)]
    confs += [(16384, 1024, 16, 4), (8192, 2048, 8, 4)]
    index = [0.75, 1.5, 3.0, 1.5, 1.5, 0.75, 0.38]
    listing = [832, 3200, 6272, 6272, 1568, 1568, 1568]
    pre = [576, 2176, 4224, 4224, 1056, 1056, 1056]
    inferred_silu = [768, 3072, 6144, 6144, 1536, 1536, 1536]
    inferred_glu = [1280, 5120, 10240, 10240, 2560, 2560, 2560]
    for i, (tokens, dim, experts, k) in enumerate(confs):
        args = {"tokens": tokens, "dim": dim, "expert_dim": 4 * dim, "top_k": k}
        got = moeblaze.index_bytes(tokens=tokens, num_experts=experts, top_k=k) / MIB
        assert got == pytest.approx(index[i], abs=0.006)
        assert moeblaze.saved_bytes(**args, glu=True, itemsize=2) == listing[i] * MIB
        assert moeblaze.saved_bytes(**args, glu=True, itemsize=2, kept="preactivations") == pre[i] * MIB
        assert moeblaze.saved_bytes(**args, glu=False, itemsize=4, kept="inferred") == inferred_silu[i] * MIB
        assert moeblaze.saved_bytes(**args, glu=True, itemsize=4, kept="inferred") == inferred_glu[i] * MIB
    assert moeblaze.routed_bytes(tokens=2_000_000, dim=6144, top_k=4) == 98_304_000_000
