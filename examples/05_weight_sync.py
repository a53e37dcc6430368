"""Sends weights from training to generation, as in reinforcement learning: two processes train and two generate, and
at every version all have the same bits. The trainers send only the weights that changed (torch_ext.WeightPublisher); to
compare the times they also send all weights.

With root, `ip` and `tc`, each process runs behind a link of 1 Gbit/s (a network namespace). Otherwise all use the
loopback, which is faster than any network. `--width 1024 --layers 12` is a larger model; `--out` is the folder of the
picture.

    python examples/05_weight_sync.py
"""

import argparse
import contextlib
import hashlib
import os
import pathlib
import shutil
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path.insert(
    0, str(pathlib.Path(__file__).absolute().parents[1])
)  # the repository's root; not needed when installed
import torch_ext

TRAINERS, ENGINES, VERSIONS, STEPS = 2, 2, 6, 2
PORTS = 29705, 29706  # the trainers' process group, the engines


def network(width: int, layers: int) -> nn.Module:
    """A model that reads 8 bytes and predicts the next."""
    torch.manual_seed(0)
    hidden = [m for _ in range(layers) for m in (nn.Linear(width, width), nn.GELU())]
    return nn.Sequential(nn.Embedding(256, width // 8), nn.Flatten(1), *hidden, nn.Linear(width, 256)).bfloat16()


def digest(weights: dict[str, Tensor]) -> bytes:
    found = hashlib.sha256()
    for name in sorted(weights):
        found.update(weights[name].detach().view(-1).view(torch.uint8).numpy().tobytes())
    return found.digest()


# -- messages: a length of 8 bytes, and as many bytes ------------------------------------------------------------------


def send(peer: socket.socket, message: bytes) -> None:
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    peer.sendall(struct.pack("<q", len(message)))
    peer.sendall(message)


def receive(peer: socket.socket) -> bytearray:
    def exactly(n: int) -> bytearray:
        found, at = bytearray(n), 0
        while at < n:
            at += peer.recv_into(memoryview(found)[at:]) or sys.exit("a peer has gone")
        return found

    return exactly(struct.unpack("<q", exactly(8))[0])


# -- the engines, which generate ---------------------------------------------------------------------------------------


def engine(model: nn.Module, host: str) -> None:
    """Receives the parts of all trainers, applies each version and generates with it."""
    weights = {name: p.detach() for name, p in model.named_parameters()}
    subscriber = torch_ext.WeightSubscriber(weights)
    with socket.create_server((host, PORTS[1]), backlog=TRAINERS) as server:
        peers = [server.accept()[0] for _ in range(TRAINERS)]
    for _ in range(VERSIONS):
        subscriber.apply([receive(peer) for peer in peers])
        for peer in peers:
            send(peer, digest(weights))
        for peer in peers:  # the same version again, all weights, to compare the times
            receive(peer)
            send(peer, b"")
        text = torch.zeros(4, 8, dtype=torch.int64)
        with torch.no_grad():
            for _ in range(16):
                text = torch.cat([text[:, 1:], model(text).argmax(1, keepdim=True)], 1)


# -- the trainers ------------------------------------------------------------------------------------------------------


def trainer(model: nn.Module, rank: int, hosts: list[str]) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://{hosts[0]}:{PORTS[0]}", rank=rank, world_size=TRAINERS)
    policy = torch_ext.load_policy(model)
    torch_ext.parallelize(model, policy, strategy="optim")
    optimizer = torch_ext.AdamW(model.named_parameters(), lr=1e-6, weight_decay=0.0, policy=policy)
    publisher = torch_ext.WeightPublisher(model, optimizer)  # version 0: the weights that the engines have
    peers = [connected(host) for host in hosts[TRAINERS:]]
    weights = dict(model.named_parameters())
    for version in range(1, VERSIONS + 1):
        for step in range(STEPS):
            seed = (version * STEPS + step) * TRAINERS + rank
            text = torch.randint(256, (32, 9), generator=torch.Generator().manual_seed(seed))
            nn.functional.cross_entropy(model(text[:, :8]).float(), text[:, 8]).backward()
            optimizer.step()
            optimizer.zero_grad()
        delta, encoded = timed(publisher.publish)
        theirs, seconds = timed(lambda message=delta: told(peers, message))
        whole = part_of(weights, rank)
        _, whole_seconds = timed(lambda message=whole: told(peers, message))
        if any(answer != digest(weights) for answer in theirs):
            sys.exit(f"version {version}: an engine has other weights")
        row = torch.tensor([len(delta), len(whole), encoded + seconds, whole_seconds], dtype=torch.float64)
        dist.all_reduce(row)
        if rank == 0:
            print(version, *(row / torch.tensor([1, 1, TRAINERS, TRAINERS])).tolist(), flush=True)
    dist.destroy_process_group()


def connected(host: str) -> socket.socket:
    for _ in range(600):
        with contextlib.suppress(OSError):
            return socket.create_connection((host, PORTS[1]))
        time.sleep(0.1)
    sys.exit(f"no answer from {host}")


def told(peers: list[socket.socket], message: bytes) -> list[bytes]:
    """Sends the message to every engine; returns their answers, which come when they have applied it."""
    for peer in peers:
        send(peer, message)
    return [bytes(receive(peer)) for peer in peers]


def timed(call: Any) -> tuple[Any, float]:
    dist.barrier()
    start = time.perf_counter()
    found = call()
    return found, time.perf_counter() - start


def part_of(weights: dict[str, Tensor], rank: int) -> bytes:
    """Returns the bytes of this trainer's share of all weights."""
    flat = torch.cat([p.detach().view(-1) for p in weights.values()]).chunk(TRAINERS)[rank]
    return flat.view(torch.uint8).numpy().tobytes()


# -- the four hosts ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def hosts() -> Iterator[tuple[str, list[tuple[list[str], str]]]]:
    """Yields the link's name and, for each host, the words to put before its command and its address."""
    ip, tc = shutil.which("ip"), shutil.which("tc")
    names = [f"torch_ext-{os.getpid()}-{i}" for i in range(TRAINERS + ENGINES + 1)]
    switch, others = names[0], names[1:]
    commands = [f"netns add {name}" for name in names]
    commands += [f"-n {switch} link add bridge type bridge", f"-n {switch} link set bridge up"]
    for i, name in enumerate(others):
        commands += [
            f"link add name eth0 netns {name} type veth peer name port{i} netns {switch}",
            f"-n {switch} link set port{i} master bridge up",
            f"-n {name} address add 10.0.0.{i + 1}/24 dev eth0",
            f"-n {name} link set lo up",
            f"-n {name} link set eth0 up",
        ]
    shapes = [(name, "eth0") for name in others] + [(switch, f"port{i}") for i in range(len(others))]
    try:
        if ip is None or tc is None:
            raise OSError("no ip or tc")
        for command in commands:
            subprocess.run([ip, *command.split()], check=True, capture_output=True)
        for name, device in shapes:
            shape = f"-n {name} qdisc add dev {device} root tbf rate 1gbit burst 256kb latency 50ms"
            subprocess.run([tc, *shape.split()], check=True, capture_output=True)
        yield "1 Gbit/s", [([ip, "netns", "exec", name], f"10.0.0.{i + 1}") for i, name in enumerate(others)]
    except (OSError, subprocess.CalledProcessError):
        yield "loopback", [([], f"127.0.0.{i + 1}") for i in range(len(others))]
    finally:
        for name in names if ip is not None else ():
            subprocess.run([ip, "netns", "delete", name], capture_output=True)


def picture(path: pathlib.Path, link: str, rows: list[list[float]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(9, 3.2))
    for panel, what, ours, whole, unit in ((panels[0], "bytes", 1, 2, 1e6), (panels[1], "seconds", 3, 4, 1)):
        for label, column, shift in (("all weights", whole, -0.2), ("what changed", ours, 0.2)):
            panel.bar([row[0] + shift for row in rows], [row[column] / unit for row in rows], 0.4, label=label)
        panel.set_yscale("log")
        panel.set_xlabel("version")
        panel.set_ylabel("megabytes to an engine" if what == "bytes" else f"seconds until engines have it, {link}")
    panels[0].legend()
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("out"))
    parser.add_argument("--rank", type=int, help="of one of the processes, which this program starts itself")
    parser.add_argument("--hosts", default="")
    args = parser.parse_args()
    if args.rank is not None:
        model = network(args.width, args.layers)
        addresses = args.hosts.split(",")
        return trainer(model, args.rank, addresses) if args.rank < TRAINERS else engine(model, addresses[args.rank])

    with hosts() as (link, places):
        own = [sys.executable, __file__, "--width", str(args.width), "--layers", str(args.layers)]
        own += ["--hosts", ",".join(address for _, address in places)]
        interface = {"GLOO_SOCKET_IFNAME": "lo" if link == "loopback" else "eth0"}
        started = [
            subprocess.Popen([*before, *own, "--rank", str(i)], stdout=subprocess.PIPE, env=os.environ | interface)
            for i, (before, _) in enumerate(places)
        ]
        try:
            output = started[0].communicate(timeout=300)[0].decode()
            failed = any([process.wait(60) for process in started])
        finally:
            for process in started:
                process.kill()
    rows = [[float(word) for word in line.split()] for line in output.splitlines()]
    if failed or len(rows) != VERSIONS:
        sys.exit("the engines did not follow")
    print(f"over {link}; to each engine:")
    for version, ours, whole, seconds, whole_seconds in rows:
        print(
            f"version {version:.0f}: {ours / 1e6:8.3f} MB in {1e3 * seconds:6.1f} ms; "
            f"all weights {whole / 1e6:8.3f} MB in {1e3 * whole_seconds:6.1f} ms"
        )
    ratio = sum(row[2] for row in rows) / sum(row[1] for row in rows)
    print(f"both engines had the trainers' bits at every version, in {ratio:.1f} times fewer bytes than all weights")
    picture(args.out / "weight_sync.png", link, rows)


if __name__ == "__main__":
    main()
