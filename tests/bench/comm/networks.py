"""Where the ranks of `bench comm` run: on loopback, or each on a host of its own behind a link of a known speed.

A host is a network namespace. A veth pair connects it to a bridge, which is in a namespace of its own too, so that no
device, address or route of the machine is touched; `tc tbf` shapes both ends of the pair, what the host sends and what
the bridge hands to it. Loopback is a namespace's as well where there can be one: then nobody else's bytes are counted.
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
    """The network cannot be made here: why, and what would make it possible."""


class Link(NamedTuple):
    """Of every host, in both directions."""

    bits_per_second: int
    burst: str  # of tbf: what may pass at once; more than a segment that the kernel has not cut yet (64 KB)
    latency: str  # of tbf: how long a packet may queue before it is dropped


LINKS: dict[str, Link | None] = {
    "loopback": None,
    "1 Gbit/s": Link(10**9, "256kb", "50ms"),
    "10 Gbit/s": Link(10**10, "2mb", "20ms"),
}


class Place(NamedTuple):
    """Where a rank runs."""

    command: tuple[str, ...]  # that its own command goes behind
    interface: str  # its data leave by it, and are counted there
    shared: bool  # by all ranks, so that its counters are of all of them


@contextmanager
def network(link: str, ranks: int) -> Iterator[list[Place]]:
    """A place for each rank, for as long as the context lasts. Raises Unavailable; leaves nothing behind."""
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
    """That left by the interface of this process's namespace, headers included."""
    with open("/proc/net/dev") as file:
        (line,) = (line for line in file if line.strip().startswith(interface + ":"))
    return int(line.partition(":")[2].split()[8])


def _hosts(stack: ExitStack, link: Link, ranks: int) -> list[Place]:
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
    """Where it is, if it is here: also where PATHs of users, and Bazel's, do not lead."""
    return shutil.which(name, path=os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin")))


def _namespace(stack: ExitStack, what: str) -> str:
    """A new one, removed with the stack. Its name is nobody else's, whatever another run left."""
    missing = [name for name in _IP_AND_TC if tool(name) is None]
    if missing:
        raise Unavailable(f"no {' and no '.join(missing)} here: install iproute2, and run as root")
    if os.geteuid() != 0:
        raise Unavailable("network namespaces are root's: run as root")
    name = f"torch_ext-{os.getpid()}-{secrets.token_hex(3)}-{what}"
    # Before it is there: what was begun is removed, too.
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
    run = subprocess.run([tool(name) or name, *arguments.split()], capture_output=True, text=True)
    if run.returncode:
        words = " ".join(run.stderr.split())
        raise Unavailable(
            f"`{name} {arguments}` failed ({words}): the kernel needs network namespaces, veth, bridge and "
            "sch_tbf, and the process CAP_SYS_ADMIN and CAP_NET_ADMIN"
        )
