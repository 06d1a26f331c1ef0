"""The emulated cluster's links: a namespace per host (:mod:`benchmarks.netns`), or one host and messages that are paced."""

from __future__ import annotations

import os
from types import TracebackType

from benchmarks import netns

__all__ = ["Cluster", "Loopback", "missing"]

BURST_KB = 10  # free credit after each pause: small against a transfer, more than a packet
WINDOW = 150_000  # bytes a connection may have under way: more only makes control messages queue behind bulk data
TCP = netns.Tcp(
    (
        ("tcp_congestion_control", "reno"),
        ("tcp_slow_start_after_idle", "0"),
        ("tcp_no_metrics_save", "1"),
        ("tcp_wmem", f"4096 {WINDOW} {WINDOW}"),
        ("tcp_limit_output_bytes", str(WINDOW)),
    ),
    route="",
)


def missing() -> str | None:
    """One sentence that says why namespaces cannot be used here, or None."""
    reason = netns.missing()
    return None if reason is None else f"{reason}; use --loopback"


class Cluster(netns.Network):
    """``with Cluster(8, rate) as c``: emulated hosts; a child process calls ``c.enter(rank)`` first.

    Args:
        num_hosts: namespaces.
        rate: bytes per second of every link, each direction.
    """

    def __init__(self, num_hosts: int, rate: float) -> None:
        self.num_hosts, self.rate = num_hosts, rate
        super().__init__(num_hosts, netns.Link(rate * 8e-6, burst_kb=BURST_KB, fair=num_hosts), tcp=TCP, control=True)


class Loopback:
    """No namespaces: processes on this host; :class:`benchmarks.emulated_cluster_device.Paced` shapes the messages instead."""

    def __init__(self, num_hosts: int, rate: float) -> None:
        self.num_hosts, self.rate = num_hosts, rate

    def address(self, rank: int) -> str:
        return "127.0.0.1"

    def __enter__(self) -> Loopback:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        return None

    def enter(self, rank: int) -> None:
        self.use("fabric")

    def use(self, network: str) -> None:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
