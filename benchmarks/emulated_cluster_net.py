"""Emulated hosts on one machine: network namespaces on a bridge, every link shaped in both directions. Root and iproute2.

Egress is shaped inside the namespace, ingress on the bridge's end of the veth pair, so a link is a full-duplex NIC. Measured
traps: egress alone makes four-to-one take a quarter of its time; a token bucket's burst is free credit after each idle period
(keep it small against a transfer); MTU 1500 splits segmented packets and costs 2-4x.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from types import TracebackType

__all__ = ["Cluster", "missing"]

_CLONE_NEWNET = 0x40000000
MTU, BURST_KB, QUEUE_MS = 9000, 24, 400
WINDOW = 150_000  # bytes a connection may have under way: more only makes control messages queue behind bulk data


def missing() -> str | None:
    """One sentence that says why namespaces cannot be used here, or None."""
    if os.name != "posix" or (not hasattr(os, "setns") and not hasattr(ctypes.CDLL(None), "setns")):
        return "network namespaces need Linux; use --loopback"
    if os.geteuid() != 0:
        return "the emulated cluster needs root for network namespaces; run it as root, or use --loopback"
    lacking = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if lacking:
        return f"the emulated cluster needs {' and '.join(lacking)} of iproute2; install iproute2, or use --loopback"
    try:
        _sh("ip netns add tmprobe")
        _sh("ip netns del tmprobe")
    except subprocess.CalledProcessError as e:
        return f"this machine refuses network namespaces ({str(e.stderr).strip()[:120]}); use --loopback"
    return None


def _sh(command: str, *, check: bool = True) -> str:
    return subprocess.run(command, shell=True, check=check, capture_output=True, text=True).stdout


class Cluster:
    """``with Cluster(8, rate) as c``: namespaces ``tm0`` .. on one bridge; a child process calls ``c.enter(rank)`` first.

    Args:
        num_hosts: namespaces.
        rate: bytes per second of every link, each direction.
    """

    def __init__(self, num_hosts: int, rate: float) -> None:
        self.num_hosts, self.rate = num_hosts, rate
        self.tag = f"tm{os.getpid() % 10000}"

    def address(self, rank: int) -> str:
        return f"10.77.0.{rank + 1}"

    def __enter__(self) -> Cluster:
        kbit = round(self.rate * 8 / 1000)
        shape = f"tbf rate {kbit}kbit burst {BURST_KB}kb latency {QUEUE_MS}ms"
        bridge = f"{self.tag}br"
        try:
            for name in (bridge, f"{bridge}h"):
                _sh(f"ip link add {name} type bridge && ip link set {name} up")
            for i in range(self.num_hosts):
                ns, veth = f"{self.tag}n{i}", f"{self.tag}v{i}"
                _sh(f"ip netns add {ns} && ip link add {veth} type veth peer name eth0 netns {ns}")
                _sh(f"ip link set {veth} mtu {MTU} master {bridge} up && ip -n {ns} link set eth0 mtu {MTU}")
                _sh(f"ip -n {ns} addr add {self.address(i)}/24 dev eth0 && ip -n {ns} link set eth0 up")
                _sh(f"ip -n {ns} link set lo up")
                host = f"{self.tag}h{i}"
                _sh(f"ip link add {host} type veth peer name eth1 netns {ns} && ip link set {host} master {bridge}h up")
                _sh(f"ip -n {ns} addr add 10.78.0.{i + 1}/24 dev eth1 && ip -n {ns} link set eth1 up")
                for key, value in (
                    ("tcp_congestion_control", "reno"),
                    ("tcp_slow_start_after_idle", "0"),
                    ("tcp_no_metrics_save", "1"),
                    ("tcp_wmem", f"4096 {WINDOW} {WINDOW}"),
                    ("tcp_limit_output_bytes", str(WINDOW)),
                ):
                    _sh(f"ip netns exec {ns} sysctl -qw net.ipv4.{key}='{value}'", check=False)
                _sh(f"ip netns exec {ns} tc qdisc replace dev eth0 root {shape} && tc qdisc replace dev {veth} root {shape}")
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        for i in range(self.num_hosts):
            _sh(f"ip netns del {self.tag}n{i}", check=False)
            _sh(f"ip link del {self.tag}v{i}", check=False)
            _sh(f"ip link del {self.tag}h{i}", check=False)
        for name in ("br", "brh"):
            _sh(f"ip link del {self.tag}{name}", check=False)

    def enter(self, rank: int) -> None:
        """Move this process into a namespace; before any socket is made."""
        fd = os.open(f"/run/netns/{self.tag}n{rank}", os.O_RDONLY)
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(fd, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns failed")
        os.close(fd)
        self.use("fabric")

    def use(self, network: str) -> None:
        """Sockets made from now on go over the shaped ``fabric``, or over the ``host`` network (counts and ids)."""
        os.environ["GLOO_SOCKET_IFNAME"] = "eth0" if network == "fabric" else "eth1"


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
