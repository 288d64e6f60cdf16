"""A network namespace with an own address for each pod: point-to-point veth pairs, routed by the node.

No bridge: replies between two bridged pods would not pass the node, and kube-proxy's translation of Service addresses
would not be undone. Every pod has all ports to itself.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from support.cluster.namespace import NODE_IP


@dataclass(frozen=True, slots=True)
class PodNetwork:
    """A pod's namespace (`/run/netns/<name>`) and address."""

    name: str
    ip: str

    @property
    def path(self) -> Path:
        """The file that stands for the namespace."""
        return Path("/run/netns", self.name)


class Addresses:
    """Hands out addresses of one /24, the longest unused first (a just freed one may still be in someone's connection)."""

    def __init__(self, prefix: str) -> None:
        """prefix: the first three numbers, as in `10.244.1`."""
        self._free = deque(f"{prefix}.{last}" for last in range(2, 255))

    def take(self) -> str:
        """An unused address."""
        if not self._free:
            raise RuntimeError("the node has no pod address left")
        return self._free.popleft()

    def give_back(self, ip: str) -> None:
        """`ip` is unused again."""
        self._free.append(ip)


async def create(ip: str) -> PodNetwork:
    """Make a namespace that answers on `ip`."""
    third, fourth = ip.split(".")[2:]
    name = f"p{third}-{fourth}"
    network = PodNetwork(name, ip)
    await destroy(network)  # left over from an agent that was killed
    host_end = f"v{third}-{fourth}"
    await _ip([], [f"netns add {name}", f"link add {host_end} type veth peer name eth0 netns {name}"])
    await _ip([], [f"link set {host_end} up", f"route replace {ip}/32 dev {host_end} src {NODE_IP}"])
    Path(f"/proc/sys/net/ipv4/conf/{host_end}/proxy_arp").write_text("1")
    await _ip(
        ["-n", name],
        [
            *("link set lo up", f"addr add {ip}/32 dev eth0", "link set eth0 up"),
            *(f"route add {NODE_IP}/32 dev eth0 scope link", f"route add default via {NODE_IP}"),
        ],
    )
    return network


async def destroy(network: PodNetwork) -> None:
    """Remove the namespace; its end of the pair goes with it, and so does the other end."""
    if not network.path.exists():
        return
    with contextlib.suppress(RuntimeError):  # a half-made one has no pair yet
        await _ip([], [f"link delete v{network.name[1:]}"])
    await _ip([], [f"netns delete {network.name}"])


async def _ip(options: list[str], lines: list[str]) -> None:
    process = await asyncio.create_subprocess_exec(
        *("ip", *options, "-batch", "-"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    _, error = await process.communicate("\n".join(lines).encode())
    if process.returncode != 0:
        raise RuntimeError(f"ip {options} {lines}: {error.decode().strip()}")
