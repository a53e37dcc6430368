"""The exchange in a world of one rank over NCCL, through the process group's communicator and through our own.

The rank sends to itself, so the weights must be those of the same training over gloo on the CPU, to the bit. Gradients
and streams are late (exchange.py), so a missing wait would read other values.
"""

import os
import pathlib
import sys
import time
from collections.abc import Iterator

import exchange
import other_process
import pytest
import torch
import torch.distributed as dist
from exchange import CPU, DEVICE, DTYPES, STRATEGIES, TRANSPORTS


@pytest.fixture(scope="module", autouse=True)
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    exchange.join(tmp_path_factory.mktemp("world"))
    yield
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def transport_is_there(request: pytest.FixtureRequest) -> None:
    if "nccl" in request.node.name and (why := exchange.why_no_nccl()):
        pytest.skip(why)


needs_gpu = pytest.mark.skipif(DEVICE.type == "cpu", reason="nothing is late on a CPU")


@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_training_has_the_bits_of_gloo(strategy: str, transport: str, dtypes: str) -> None:
    expected = exchange.trained(strategy, DTYPES[dtypes], CPU)
    with exchange.sleeping_streams():
        assert exchange.trained(strategy, DTYPES[dtypes], DEVICE, transport) == expected


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gathers_of_their_own_have_the_bits_of_gloo(strategy: str, transport: str) -> None:
    dtypes = DTYPES["bf16-main-fp32"]
    expected = exchange.trained(strategy, dtypes, CPU)
    with exchange.sleeping_streams():
        found = exchange.trained(strategy, dtypes, DEVICE, transport, create_all_gather_group=True)
    assert found == expected


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_of_one_rank_it_changes_nothing(strategy: str, transport: str) -> None:
    plain = exchange.plainly(DTYPES["fp32"], DEVICE)
    assert exchange.trained(strategy, DTYPES["fp32"], DEVICE, transport) == plain


@needs_gpu
def test_a_wait_for_nccl_that_is_missing_shows() -> None:
    """Checks the test above: the sleeping streams must show a missing wait."""
    expected = exchange.trained("optim", DTYPES["fp32"], CPU)
    with exchange.sleeping_streams(), exchange.without_waits_for_nccl():
        assert exchange.trained("optim", DTYPES["fp32"], DEVICE, "nccl") != expected


def test_memory_of_the_nccl_transport_is_written_and_read() -> None:
    """Memory is in NCCL's windows if this NCCL has them. Both collectives, the all-gather in place."""
    transport = exchange.transport_of_world()
    sent, into = transport.allocate(1 << 16), transport.allocate(1 << 16)
    assert sent.device == DEVICE and sent.numel() == 1 << 16
    sent.copy_(torch.arange(1 << 16, device=DEVICE).to(torch.uint8))
    into.zero_()
    for work in transport.all_to_all([into], [sent], "a window"):
        work.wait()
    assert torch.equal(into, sent)
    for work in transport.all_gather([into], 0, "a window, in place"):
        work.wait()
    assert torch.equal(into, sent)


def test_what_is_under_way_with_nccl_is_polled_until_it_is_done() -> None:
    transport = exchange.transport_of_world()
    sent = torch.zeros(1 << 16, dtype=torch.uint8, device=DEVICE)
    transport.all_to_all([torch.empty_like(sent)], [sent], "the first")
    watchdog = transport._watchdog
    assert watchdog is not None
    exchange.synchronize()
    assert watchdog.poll(time.monotonic()) and not watchdog._under_way
    exchange.sleep(DEVICE, 100 * exchange.LATE)
    transport.all_to_all([torch.empty_like(sent)], [sent], "late")
    assert len(watchdog._under_way) == 1
    exchange.synchronize()
    assert watchdog.poll(time.monotonic()) and not watchdog._under_way


# -- processes that end in special ways ------------------------------------------------------------------------------

HEAD = """
import pathlib, sys, time
import torch, torch.distributed as dist
import exchange
from exchange import DEVICE, DTYPES
exchange.join(pathlib.Path(sys.argv[1]), timeout=float(sys.argv[2]))
"""
# By name: what the process does, what it must print, its exit status.
ENDS = {
    "destroyed": ("exchange.trained('optim', DTYPES['fp32'], DEVICE, TRANSPORT); dist.destroy_process_group()", "", 0),
    "just_ends": ("exchange.trained('no_shard', DTYPES['fp32'], DEVICE, TRANSPORT)", "", 0),
    "raises": (
        "exchange.trained('optim', DTYPES['fp32'], DEVICE, TRANSPORT); raise SystemExit('of its own')",
        "own",
        1,
    ),
}


def ended(folder: pathlib.Path, code: str, timeout: float = 60.0) -> tuple[int, str]:
    """Runs a process and returns its exit status and output. timeout: of its process group."""
    paths = [str(pathlib.Path(__file__).parent), *sys.path]
    return other_process.run(HEAD + code, folder, timeout, PYTHONPATH=os.pathsep.join(p for p in paths if p))


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("way", ENDS)
def test_a_process_ends_as_it_should(way: str, transport: str, tmp_path: pathlib.Path) -> None:
    code, says, status = ENDS[way]
    found, text = ended(tmp_path, code.replace("TRANSPORT", repr(transport)))
    assert found == status and says in text, text
    for word in ("Exception ignored", "terminate called", "Aborted", "Segmentation"):
        assert word not in text, text


@needs_gpu
def test_what_hangs_in_the_nccl_transport_is_aborted_and_told(tmp_path: pathlib.Path) -> None:
    """A kernel that sleeps longer than the group's time-out stands for a lost rank."""
    code = """
transport = exchange.transport_of_world()
sent = torch.zeros(1 << 16, dtype=torch.uint8, device=DEVICE)
transport.all_to_all([torch.empty_like(sent)], [sent], "bucket 6")
with transport._streams.on(transport._stream):
    for _ in range(8):
        exchange.sleep(DEVICE, 2_000_000_000)
transport.all_to_all([torch.empty_like(sent)], [sent], "bucket 7")
time.sleep(6)
try:
    transport.all_to_all([torch.empty_like(sent)], [sent], "bucket 8")
except RuntimeError as error:
    print("refused:", error)
"""
    status, text = ended(tmp_path, code, timeout=3.0)
    assert status == 0 and "refused: all-to-all of bucket 8" in text, text
    assert "bucket 7 was not done after 3 s" in text, text
