"""A process that ends by an exception, with buckets on their way, ends as Python says: by its traceback and status
1."""

import os
import pathlib
import subprocess
import sys
import tempfile

PROGRAM = """
import datetime, sys, time
import torch.distributed as dist
from gradients import Given, noise, policy
import torch_ext

rank, world, store = int(sys.argv[1]), 2, sys.argv[2]
timeout = datetime.timedelta(seconds=20)
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timeout)
shapes = [(1000,)] * 40
chosen = policy(bucket_size=1, overlap_grad_reduce=True)
model = torch_ext.parallelize(Given(shapes), chosen, strategy="no_shard")
for step in range(2):
    model(noise(step, rank, shapes)).backward()
    model.zero_grad()
for i, p in enumerate(model.parameters()):
    if rank == 1:  # which comes while rank 0 ends
        p.register_hook(lambda grad: time.sleep(0.03))
    if i == (36 if rank == 0 else 1):
        p.register_hook(lambda grad: 1 / 0)
model(noise(2, rank, shapes)).backward()
"""


def test_an_uncaught_exception_ends_a_process_in_order() -> None:
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        store = str(pathlib.Path(folder) / "store")
        started = [
            subprocess.Popen(
                [sys.executable, "-c", PROGRAM, str(rank), store],
                env=environment,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        try:
            messages = [process.communicate(timeout=60.0)[1] for process in started]
        finally:
            for process in started:
                process.kill()
                process.wait()
    assert [process.returncode for process in started] == [1, 1], messages
    assert all("ZeroDivisionError" in message.splitlines()[-1] for message in messages)
