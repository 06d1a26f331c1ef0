"""Emulated nodes on one Linux machine: network namespaces on a bridge, every node's link shaped in both directions.

Processes in one namespace are the lanes of one node: what they send each other stays on the loopback device. Needs root and
iproute2. A token bucket (htb) shapes the rate; ``packet_bytes`` makes every packet cost at least that many bytes, which stands
for the fixed cost of a message on a network card.

Measured traps: without ingress shaping four-to-one takes a quarter of its time; a bucket's burst is free credit after each
pause; with an MTU of 1500 transfers take 2 to 4 times as long; a message larger than TCP's first window waits 40 ms for a
delayed acknowledgement, which a network card would not do, so windows start large.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from dataclasses import dataclass
from types import TracebackType
from typing import Self

__all__ = ["Link", "Network", "Tcp", "missing"]

CLONE_NEWNET = 0x40000000
MTU, QUEUE_MS = 9000, 400


@dataclass(frozen=True)
class Link:
    """One node's link, each direction.

    Args:
        mbit: rate in Mbit/s.
        packet_bytes: least bytes that a packet counts for; 0 for its own size.
        burst_kb: size of the bucket.
        small_first: packets below so many bytes, a power of two, overtake (acknowledgements, gloo's ready frames): in one queue
            they would wait behind another lane's bulk data, which no network card with queue pairs does. The last packet of a
            message must not be among them: TCP takes the packets that it overtakes for lost. 0: one plain token bucket.
        fair: with so many nodes, a queue for every other node instead, served in turn: no packet overtakes one of its own
            connection, and nobody's messages wait for all of another's.
    """

    mbit: float
    packet_bytes: int = 0
    burst_kb: int = 16
    small_first: int = 2048
    fair: int = 0

    def shape(self, device: str, other: str = "dst") -> str:
        """Commands that shape what leaves ``device``; the other node is the ``dst`` or ``src`` of its packets."""
        kbit = round(self.mbit * 1000)
        if self.fair:
            return self._fair(device, other, kbit)
        if not self.small_first:
            return f"tc qdisc replace dev {device} root tbf rate {kbit}kbit burst {self.burst_kb}kb latency {QUEUE_MS}ms"
        size = f"burst {self.burst_kb}kb cburst {self.burst_kb}kb quantum 9000" + (
            f" mpu {self.packet_bytes}" if self.packet_bytes else ""
        )
        add = f"tc class add dev {device}"
        small = f"0x{0x10000 - self.small_first:04x}"  # the length field without these bits is 0
        return " && ".join(
            [
                f"tc qdisc replace dev {device} root handle 1: htb default 20",
                f"{add} parent 1: classid 1:1 htb rate {kbit}kbit {size}",
                f"{add} parent 1:1 classid 1:10 htb rate {kbit // 2}kbit ceil {kbit}kbit prio 0 {size}",
                f"{add} parent 1:1 classid 1:20 htb rate {kbit // 2}kbit ceil {kbit}kbit prio 1 {size}",
                f"tc filter add dev {device} parent 1: protocol ip prio 1 u32 match u16 0x0000 {small} at 2 flowid 1:10",
            ]
        )

    def _fair(self, device: str, other: str, kbit: int) -> str:
        size = f"burst {self.burst_kb}kb cburst {self.burst_kb}kb quantum 9000"
        add = f"tc class add dev {device}"
        commands = [
            f"tc qdisc replace dev {device} root handle 1: htb default 10",
            f"{add} parent 1: classid 1:1 htb rate {kbit}kbit {size}",
        ]
        for n in range(self.fair):
            # next to no rate of its own: all borrow from the link, whose bucket is the only one that fills in a pause
            commands.append(f"{add} parent 1:1 classid 1:{10 + n} htb rate 8kbit ceil {kbit}kbit {size}")
            match = f"match ip {other} 10.78.0.{n + 1}/32 flowid 1:{10 + n}"
            commands.append(f"tc filter add dev {device} parent 1: protocol ip prio 1 u32 {match}")
        return " && ".join(commands)

    def __str__(self) -> str:
        cost = f", {self.packet_bytes * 8 / self.mbit / 1000:.2f} ms a packet" if self.packet_bytes else ""
        return f"{self.mbit:g} Mbit/s{cost}"


@dataclass(frozen=True)
class Tcp:
    """TCP of the nodes.

    Args:
        settings: of ``net.ipv4``; those that the kernel does not have per namespace are left alone.
        route: options of the route between the nodes.
    """

    settings: tuple[tuple[str, str], ...] = (
        ("tcp_congestion_control", "reno"),
        ("tcp_slow_start_after_idle", "0"),
        ("tcp_rmem", "4096 4194304 8388608"),
        ("tcp_wmem", "4096 4194304 8388608"),
    )
    route: str = "initcwnd 512 initrwnd 512 quickack 1"


def missing() -> str | None:
    """One sentence that says what emulated nodes need and this machine does not have; None if it has all of it."""
    if not hasattr(os, "geteuid") or not os.path.isdir("/proc/self/ns"):
        return "emulated nodes need Linux network namespaces, and this is another system"
    if os.geteuid() != 0:
        return "emulated nodes need root (network namespaces and traffic shaping), and this process is not root"
    absent = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if absent:
        return f"emulated nodes need {' and '.join(absent)} of iproute2, which are not installed"
    try:
        with Network(1, Link(100.0)):
            pass
    except subprocess.CalledProcessError as e:
        return f"the kernel refuses an emulated node: {' '.join(str(e.stderr).split())[:160]}"
    return None


def _sh(command: str, *, check: bool = True) -> None:
    subprocess.run(command, shell=True, check=check, capture_output=True, text=True)


class Network:
    """``with Network(4, Link(100))``: nodes 0..3; a child process calls ``enter(node)`` before it opens a socket.

    Args:
        nodes: how many.
        link: of every node.
        tcp: of every node.
        control: also an unshaped network, which :meth:`use` chooses.
    """

    def __init__(self, nodes: int, link: Link, *, tcp: Tcp | None = None, control: bool = False) -> None:
        self.nodes, self.link, self.tcp, self.control = nodes, link, tcp or Tcp(), control
        self.tag = f"tn{os.getpid() % 100000}"

    def address(self, node: int) -> str:
        return f"10.78.0.{node + 1}"

    def __enter__(self) -> Self:
        try:
            self._bridge("b")
            if self.control:
                self._bridge("c")
            for i in range(self.nodes):
                ns = f"{self.tag}n{i}"
                _sh(f"ip netns add {ns} && ip -n {ns} link set lo up")
                for key, value in self.tcp.settings:
                    _sh(f"ip netns exec {ns} sysctl -qw net.ipv4.{key}='{value}'", check=False)
                veth = self._join(i, "b", "eth0", f"{self.address(i)}/24")
                if self.tcp.route:
                    _sh(f"ip -n {ns} route change 10.78.0.0/24 dev eth0 {self.tcp.route}")
                _sh(f"ip netns exec {ns} sh -c '{self.link.shape('eth0')}'")
                _sh(self.link.shape(veth, "src"))
                if self.control:
                    self._join(i, "c", "eth1", f"10.79.0.{i + 1}/24")
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def _bridge(self, letter: str) -> None:
        _sh(f"ip link add {self.tag}{letter} type bridge && ip link set {self.tag}{letter} up")

    def _join(self, node: int, letter: str, device: str, address: str) -> str:
        """Connect a node's new ``device`` with a bridge; returns the name of its other end, where ingress is shaped."""
        ns, veth = f"{self.tag}n{node}", f"{self.tag}{letter}{node}"
        _sh(f"ip link add {veth} type veth peer name {device} netns {ns}")
        _sh(f"ip link set {veth} mtu {MTU} gso_max_size {MTU} master {self.tag}{letter} up")
        _sh(f"ip -n {ns} link set {device} mtu {MTU} gso_max_size {MTU}")
        _sh(f"ip -n {ns} addr add {address} dev {device} && ip -n {ns} link set {device} up")
        return veth

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        letters = "bc" if self.control else "b"
        for i in range(self.nodes):
            for letter in letters:
                _sh(f"ip link del {self.tag}{letter}{i}", check=False)
            _sh(f"ip netns del {self.tag}n{i}", check=False)
        for letter in letters:
            _sh(f"ip link del {self.tag}{letter}", check=False)

    def enter(self, node: int) -> None:
        """Move this process into a node."""
        fd = os.open(f"/run/netns/{self.tag}n{node}", os.O_RDONLY)
        try:
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.setns(fd, CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns failed")
        finally:
            os.close(fd)
        self.use("fabric")

    def use(self, network: str) -> None:
        """gloo's groups made from now on go over the shaped ``fabric``, or over the unshaped ``host`` network."""
        os.environ["GLOO_SOCKET_IFNAME"] = "eth0" if network == "fabric" else "eth1"
