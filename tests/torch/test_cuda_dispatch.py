"""Dispatch to the CUDA library: calls with tensors on a GPU reach it with all their arguments. The library is searched,
checked and loaded when the first such tensor comes."""

import json
import os
import pathlib
import shutil
import subprocess
import sys
from typing import Any

import c_api
import gpu_stand_in
import operator_samples
import pytest

import torch_ext

VARIABLE = "TORCH_EXT_CUDA_LIBRARY"
HELPERS = pathlib.Path(operator_samples.__file__).parent
BEGIN = f"""
import json, os, sys
sys.path[:0] = {[str(HELPERS), str(gpu_stand_in.ROOT)]!r}
import torch
import torch_ext
import operator_samples
from gpu_stand_in import StandIn, as_cuda
ops = torch.ops.torch_ext
def refusal(function):
    try:
        function()
    except RuntimeError as error:
        return str(error).splitlines()[0]
"""
MOVE = """
def moved(operator, arguments, index=0):
    return operator_samples.moved(operator, arguments, lambda t: as_cuda(t, index))
"""


def run(code: str, *arguments: object, begin: str = BEGIN + MOVE, **variables: str) -> Any:
    """Returns what the code prints as JSON, run in a process of its own."""
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE} | variables
    command = [sys.executable, "-c", begin + code, *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> list[pathlib.Path]:
    """Returns the stand-ins for the CUDA library and for libtorch_cuda.so."""
    folder = tmp_path_factory.mktemp("stand_in")
    return [gpu_stand_in.cuda_library(folder), gpu_stand_in.libtorch_cuda(folder)]


# name -> arguments of a wrong call, and its error. x is a tensor on the CPU; y and z are on cuda:0 and cuda:1.
REFUSED = {
    "two_gpus": ("[y], [z]", "main_grads[0] is on cuda:0 and grads[0] on cuda:1"),
    "cpu_and_gpu": ("[x], [y]", "main_grads[0] is on cpu and grads[0] on cuda:0"),
    "gpu_and_cpu": ("[y], [x]", "main_grads[0] is on cuda:0 and grads[0] on cpu"),
}
ONE_DEVICE = "all tensors of a call must be on one device"


@pytest.fixture(scope="module")
def found(libraries: list[pathlib.Path]) -> dict[str, Any]:
    """Returns what one process with the stand-in found."""
    calls = ", ".join(f"refusal(lambda: ops.bucket_accumulate_({arguments}))" for arguments, _ in REFUSED.values())
    code = f"""
stand_in = StandIn(*sys.argv[1:])
found = {{"samples": {{}}}}
for sample in operator_samples.DISPATCHED:
    here, there = sample.make(), sample.make()
    before = len(stand_in.calls())
    operator_samples.overload(sample.operator)(*here)
    assert len(stand_in.calls()) == before
    operator_samples.overload(sample.operator)(*moved(sample.operator, there, 1))
    same = operator_samples.bits(here) == operator_samples.bits(there)
    changed = operator_samples.bits(sample.make()) != operator_samples.bits(there)
    found["samples"][sample.id] = same, changed, stand_in.calls()[before:]

stand_in.allocated.clear()
ops.master_checksum_(*moved("master_checksum_", operator_samples.master_checksum()))
(memory,) = stand_in.allocated
workspace, size = stand_in.calls()[-1][3:5]
found["guards"] = stand_in.guards()
found["workspace"] = [workspace == memory.data_ptr(), size, memory.numel(), memory.dtype == torch.uint8]

before = len(stand_in.calls())
x = torch.zeros(3)
y, z = as_cuda(x, 0), as_cuda(x, 1)
found["refused"] = [{calls}]
step = moved("adamw_", operator_samples.adamw())
step[6][1] = torch.ones(1)
found["step"] = refusal(lambda: ops.adamw_(*step))
pack = moved("bucket_pack_", operator_samples.bucket_pack())
pack[1] = as_cuda(pack[1])
found["table"] = refusal(lambda: ops.bucket_pack_(*pack))
hosts = dict.fromkeys(operator_samples.HOST_ONLY)
for sample in operator_samples.SAMPLES:
    if sample.operator in hosts:
        there = moved(sample.operator, sample.make(), 1)
        hosts[sample.operator] = refusal(lambda: operator_samples.overload(sample.operator)(*there))
found["hosts"] = hosts
assert len(stand_in.calls()) == before
wrong = torch.zeros(3, dtype=torch.int16)
found["wrong"] = [refusal(lambda: ops.bucket_accumulate_([x], [wrong])),
                  refusal(lambda: ops.bucket_accumulate_([y], [as_cuda(wrong)]))]
print(json.dumps(found))
"""
    seen: dict[str, Any] = run(code, *libraries, **{VARIABLE: str(libraries[0])})
    return seen


ALL = [s.id for s in operator_samples.DISPATCHED]
EMPTY = ("no_tensors", "nothing")  # samples without elements: their tensors are on no device
# Samples that get a workspace (tx_cuda_workspace): AdamW steps that only check, and fp32 masters with checksums in
# master_checksum_ and in muon_update_ that resyncs.
NEEDS_WORKSPACE = [
    "adamw_flat_-only_a_check",
    "master_checksum_-checked",
    "master_checksum_-renewed",
    "muon_update_-bfloat16_with_masters",
]


@pytest.mark.parametrize("sample", ALL)
def test_a_call_with_tensors_on_a_gpu_reaches_the_library_with_all_its_arguments(
    sample: str, found: dict[str, Any]
) -> None:
    same, changed, calls = found["samples"][sample]
    operator = sample.split("-")[0].rstrip("_").replace("adamw_flat", "adamw")
    assert same
    if sample.endswith(EMPTY):
        assert not calls
        return
    assert changed or sample == "adamw_flat_-only_a_check"
    assert [call[:3] for call in calls] == [[operator, 1, gpu_stand_in.STREAM + 1]], "on the device's current stream"


@pytest.mark.parametrize("sample", ALL)
def test_only_calls_that_look_at_samples_get_a_workspace(sample: str, found: dict[str, Any]) -> None:
    for *_, workspace, bytes_, _guards in found["samples"][sample][2]:
        assert (workspace != 0, bytes_ > 0) == (sample in NEEDS_WORKSPACE,) * 2


def test_torch_itself_makes_the_device_current_for_each_call(found: dict[str, Any]) -> None:
    """torch's guard is active around each call. If making the device current would create a context, torch only
    remembers the device, per thread."""
    assert {guards for _, _, calls in found["samples"].values() for *_, guards in calls} == {1}
    assert found["guards"] == [0, 1 << 1 | 1 << 0], "of cuda:1, and of cuda:0 for the call before this"


def test_the_workspace_is_memory_of_torchs(found: dict[str, Any]) -> None:
    tensors = 4  # of the sample; the stand-in asks for 24 bytes per tensor
    assert found["workspace"] == [True, 24 * tensors, 24 * tensors, True]


def test_the_librarys_refusal_reaches_the_caller_as_the_cpus_does(found: dict[str, Any]) -> None:
    here, there = found["wrong"]
    assert here == there == "torch_ext::bucket_accumulate_: grads[0] is int16; fp32, bf16 and fp16 are legal"


@pytest.mark.parametrize("case", REFUSED)
def test_tensors_on_mixed_devices_are_named_with_their_devices(case: str, found: dict[str, Any]) -> None:
    """The error may name the two tensors in either order."""
    says = REFUSED[case][1].replace("main_grads[0] is on ", "").replace(" and grads[0] on ", " ").split()
    main, grad = says
    assert found["refused"][list(REFUSED).index(case)] in (
        f"torch_ext::bucket_accumulate_: grads[0] is on {grad} and main_grads[0] on {main}; {ONE_DEVICE}",
        f"torch_ext::bucket_accumulate_: main_grads[0] is on {main} and grads[0] on {grad}; {ONE_DEVICE}",
    )


def test_a_count_on_the_cpu_beside_weights_on_a_gpu_is_named(found: dict[str, Any]) -> None:
    """A step count on the CPU with weights on a GPU is an error that names both."""
    assert found["step"] == f"torch_ext::adamw_: steps[1] is on cpu and params[0] on cuda:0; {ONE_DEVICE}"


def test_a_table_on_a_gpu_is_named(found: dict[str, Any]) -> None:
    """Tables such as offsets must be on the CPU even if all other tensors are on a GPU."""
    assert found["table"] == (
        "torch_ext::bucket_pack_: offsets is on cuda:0; it is a table, which is on the cpu wherever the other tensors "
        "are"
    )


@pytest.mark.parametrize("operator", operator_samples.HOST_ONLY)
def test_an_operator_without_a_kernel_for_gpus_says_so(operator: str, found: dict[str, Any]) -> None:
    assert found["hosts"][operator] == (
        f"torch_ext::{operator}: {operator} has no kernel for GPUs, and got tensors on cuda:1; tensors on the CPU are "
        "legal"
    )


def test_a_cpu_user_never_meets_the_library(libraries: list[pathlib.Path]) -> None:
    code = """
weights = torch.nn.Parameter(torch.ones(300))
opt = torch_ext.AdamW([weights], lr=0.1)
weights.sum().backward()
torch_ext.clip_grad_norm_(opt, 1.0)
opt.step()
for sample in operator_samples.SAMPLES:
    operator_samples.overload(sample.operator)(*sample.make())
print(json.dumps("libtorch_ext_cuda" in open("/proc/self/maps").read()))
"""
    assert run(code, **{VARIABLE: str(libraries[0])}) is False


# -- finding it, without torch ---------------------------------------------------------------------------------------

ASK = """
import ctypes, json, sys
path, error = ctypes.create_string_buffer(4096), ctypes.create_string_buffer(1024)
status = ctypes.CDLL(sys.argv[1]).tx_torch_cuda_library(path, len(path), error)
print(json.dumps([status, (error if status else path).value.decode()]))
"""


@pytest.fixture
def main_library(tmp_path: pathlib.Path) -> pathlib.Path:
    """Returns a copy of the library in a folder of its own, without a CUDA library next to it."""
    return pathlib.Path(shutil.copy(torch_ext.library_path(), tmp_path))


def test_without_the_library_the_message_says_where_it_was_looked_for_and_how_to_get_it(
    main_library: pathlib.Path,
) -> None:
    assert run(ASK, main_library, begin="") == [
        301,
        f"this build has no CUDA library: no libtorch_ext_cuda.so in {main_library.parent}/ nor in its folder cuda. "
        "Build it where nvcc is (bazel build //cuda:libtorch_ext_cuda.so), install a wheel that was built there, or "
        "name it in TORCH_EXT_CUDA_LIBRARY",
    ]


@pytest.mark.parametrize("place", ["libtorch_ext_cuda.so", "cuda/libtorch_ext_cuda.so"], ids=["wheel", "bazel-bin"])
def test_the_library_is_found_beside_the_main_one(
    libraries: list[pathlib.Path], main_library: pathlib.Path, place: str
) -> None:
    path = main_library.parent / place
    path.parent.mkdir(exist_ok=True)
    shutil.copy(libraries[0], path)
    assert run(ASK, main_library, begin="") == [0, str(path)]


def test_the_variable_wins_over_what_lies_beside(libraries: list[pathlib.Path], main_library: pathlib.Path) -> None:
    shutil.copy(libraries[0], main_library.parent)
    assert run(ASK, main_library, begin="", **{VARIABLE: str(libraries[0])}) == [0, str(libraries[0])]


def test_a_library_of_another_version_is_refused_with_both(main_library: pathlib.Path) -> None:
    other = gpu_stand_in.cuda_library(main_library.parent, "3 << 16 | 2 << 8 | 1")
    status, message = run(ASK, main_library, begin="")
    assert status == 301
    assert message.startswith(f"{other} is of version 3.2.1 and libtorch_ext.so of {c_api.version()}; build both from")


NOT_OURS = {
    "missing": (None, f"{VARIABLE} names {{path}}, which cannot be read"),
    "no_library": ("text", "the CUDA library could not be loaded: {path}: "),
    "somebody_elses": ("int nothing;", "{path} has no function tx_cuda_version: is it this library's?"),
    "half_of_ours": (
        "#include <stdint.h>\nuint32_t tx_version(void);\nuint32_t tx_cuda_version(void) { return tx_version(); }",
        "{path} has no function tx_cuda_adamw: is it this library's?",
    ),
}


@pytest.mark.parametrize("source, says", NOT_OURS.values(), ids=NOT_OURS)
def test_a_file_that_is_not_the_library_is_named(
    main_library: pathlib.Path, source: str | None, says: str, tmp_path: pathlib.Path
) -> None:
    path = tmp_path / "libtorch_ext_cuda.so"
    if source == "text":
        path.write_text(source)
    elif source:
        gpu_stand_in.compile_library(tmp_path, path.name, source, torch_ext.library_path())
    status, message = run(ASK, main_library, begin="", **{VARIABLE: str(path)})
    assert status == 301 and message.startswith(says.format(path=path))


def test_an_operator_says_so_too_and_a_torch_without_cuda_is_named(libraries: list[pathlib.Path]) -> None:
    """A failed search is not remembered: a library that appears later is found."""
    code = """
torch.cuda._lazy_init = lambda: None
x = as_cuda(torch.zeros(3))
call = lambda: refusal(lambda: ops.bucket_accumulate_([x], [as_cuda(torch.ones(3))]))
missing = call()
os.environ["TORCH_EXT_CUDA_LIBRARY"] = sys.argv[1]
print(json.dumps([missing, call()]))
"""
    missing, without = run(code, libraries[0], **{VARIABLE: "/nowhere/libtorch_ext_cuda.so"})
    assert missing == (
        f"torch_ext::bucket_accumulate_: {VARIABLE} names /nowhere/libtorch_ext_cuda.so, which cannot be read"
    )
    assert without.startswith(
        "torch_ext::bucket_accumulate_: this torch has no CUDA: no aoti_torch_get_current_cuda_stream in "
        "libtorch_cuda.so"
    )
