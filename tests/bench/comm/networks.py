"""The networks of `bench comm`: ranks run on loopback, or each on a host of its own behind a link of a known speed.

A host is a network namespace. A veth pair connects it to a bridge. The bridge is in a namespace of its own too, so that
no device, address or route of the machine is touched. `tc tbf` shapes both ends of the pair: what the host sends, and
what the bridge sends to it. Loopback is also that of a new namespace, if possible, so that no other bytes are counted.
"""

import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

_IP_AND_TC = ("ip", "tc")


class Unavailable(Exception):
    """The network cannot be created on this machine. The message says why, and what would make it possible."""


class Link(NamedTuple):
    """The link of every host, the same in both directions."""

    bits_per_second: int
    burst: str  # tbf's burst: has to exceed a segment that the kernel has not cut into packets yet (64 KB)
    latency: str  # tbf's latency: how long a packet may queue before it is dropped


LINKS: dict[str, Link | None] = {
    "loopback": None,
    "1 Gbit/s": Link(10**9, "256kb", "50ms"),
    "10 Gbit/s": Link(10**10, "2mb", "20ms"),
}


class Place(NamedTuple):
    """Where a rank runs."""

    command: tuple[str, ...]  # the prefix of the rank's command
    interface: str  # the interface that its data leave by, where they are counted
    shared: bool  # whether all ranks use this interface, so that its counters are sums over the ranks


@contextmanager
def network(link: str, ranks: int) -> Iterator[list[Place]]:
    """Yields a place for each rank. The network exists as long as the context lasts. Raises Unavailable if it cannot be
    created; nothing is left behind then."""
    shape = LINKS[link]
    with ExitStack() as stack:
        if shape is not None:
            yield _hosts(stack, shape, ranks)
            return
        try:
            alone = _namespace(stack, "lo")
            _ip(alone, "link set lo up")
            place = Place(_inside(alone), "lo", True)
        except Unavailable:
            place = Place((), "lo", True)
        yield [place] * ranks


def sent_bytes(interface: str) -> int:
    """Returns the bytes that left by an interface of this process's namespace, headers included."""
    with open("/proc/net/dev") as file:
        (line,) = (line for line in file if line.strip().startswith(interface + ":"))
    return int(line.partition(":")[2].split()[8])


def _hosts(stack: ExitStack, link: Link, ranks: int) -> list[Place]:
    """Creates a host for each rank and the bridge between them."""
    switch = _namespace(stack, "switch")
    _ip(switch, "link add bridge type bridge")
    _ip(switch, "link set bridge up")
    places = []
    for rank in range(ranks):
        host, port = _namespace(stack, str(rank)), f"port{rank}"
        _call("ip", f"link add name eth0 netns {host} type veth peer name {port} netns {switch}")
        _ip(switch, f"link set {port} master bridge up")
        _ip(host, f"address add 10.0.0.{rank + 1}/24 dev eth0")
        for namespace, device in ((host, "eth0"), (switch, port)):
            shape = f"rate {link.bits_per_second}bit burst {link.burst} latency {link.latency}"
            _call("tc", f"-n {namespace} qdisc add dev {device} root tbf {shape}")
        _ip(host, "link set lo up")
        _ip(host, "link set eth0 up")
        places.append(Place(_inside(host), "eth0", False))
    return places


def tool(name: str) -> str | None:
    """Returns the path of a program, or None. Also searches the sbin folders, which users and Bazel lack in their
    PATH."""
    return shutil.which(name, path=os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin")))


def _namespace(stack: ExitStack, what: str) -> str:
    """Creates a network namespace, which is removed with the stack, and returns its name. The name is unique, even if
    another run left namespaces behind."""
    missing = [name for name in _IP_AND_TC if tool(name) is None]
    if missing:
        raise Unavailable(f"no {' and no '.join(missing)} here: install iproute2, and run as root")
    if os.geteuid() != 0:
        raise Unavailable("network namespaces are root's: run as root")
    name = f"torch_ext-{os.getpid()}-{secrets.token_hex(3)}-{what}"
    # Registered before the namespace is created, so that it is also removed if creating it fails half-way.
    stack.callback(
        subprocess.run, [tool("ip") or "ip", "netns", "delete", name], stderr=subprocess.DEVNULL, check=False
    )
    _call("ip", f"netns add {name}")
    return name


def _inside(namespace: str) -> tuple[str, ...]:
    return (tool("ip") or "ip", "netns", "exec", namespace)


def _ip(namespace: str, arguments: str) -> None:
    _call("ip", f"-n {namespace} {arguments}")


def _call(name: str, arguments: str) -> None:
    """Runs ip or tc. Raises Unavailable, with the requirements of the network, if it fails."""
    run = subprocess.run([tool(name) or name, *arguments.split()], capture_output=True, text=True)
    if run.returncode:
        words = " ".join(run.stderr.split())
        raise Unavailable(
            f"`{name} {arguments}` failed ({words}): the kernel needs network namespaces, veth, bridge and "
            "sch_tbf, and the process CAP_SYS_ADMIN and CAP_NET_ADMIN"
        )
