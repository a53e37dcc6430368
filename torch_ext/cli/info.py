"""python -m torch_ext info: prints what was found on this machine."""

import ctypes
import platform
from collections.abc import Iterator

import torch

from torch_ext.native import cuda_library, library, paths
from torch_ext.native import nccl as native_nccl


def text() -> str:
    """Returns one line per fact, in two columns."""
    facts = list(_facts())
    width = max(len(name) for name, _ in facts)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in facts)


def _facts() -> Iterator[tuple[str, str]]:
    yield "torch_ext", library.version()
    yield "library", paths.library_path()
    yield "torch", f"{torch.__version__} ({'.'.join(torch.__path__)})"
    yield "python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    yield "instruction sets", f"{', '.join(isas())}; in use: {selected_isa()}"
    yield "threads", f"{torch.get_num_threads()} (torch.get_num_threads)"
    yield "operators", ", ".join(library.operators())
    yield from _cuda()
    yield "NCCL in torch", nccl()
    yield from native_nccl.describe()


def isas() -> list[str]:
    """Returns the instruction sets that the library was built for and this processor has, slowest first."""
    name_of = library.function("tx_isa_name", ctypes.c_int32, restype=ctypes.c_char_p)
    names: list[str] = []
    while name := name_of(len(names)):
        names.append(name.decode())
    return names


def selected_isa() -> str:
    """Returns the instruction set that steps use."""
    value = library.function("tx_isa_selected", restype=ctypes.c_char_p)()
    return value.decode() if value else "none"


def _cuda() -> Iterator[tuple[str, str]]:
    try:
        about = cuda_library.about()
    except RuntimeError as refusal:
        yield "CUDA library", f"none: {refusal}"
    else:
        yield "CUDA library", f"{about.path}: built with CUDA {about.built_with} for {about.architectures}"
        driver = f"runs CUDA {about.driver}; devices: {about.devices}" if about.driver else "none"
        yield "CUDA driver", driver + (f"; the library runs on none of them: {about.why_not}" if about.why_not else "")
    yield "CUDA in torch", cuda()


def cuda() -> str:
    """Returns the CUDA devices that torch sees, or why there are none."""
    if not torch.backends.cuda.is_built():
        return "none: this torch is built without CUDA"
    built = f"built with CUDA {torch.version.cuda}"
    if not torch.cuda.is_available():
        return f"{built}; no device: torch finds none, or no driver"
    return f"{built}; {', '.join(map(_device, range(torch.cuda.device_count())))}"


def _device(index: int) -> str:
    major, minor = torch.cuda.get_device_capability(index)
    return f"cuda:{index} {torch.cuda.get_device_name(index)} (sm_{major}{minor})"


def nccl() -> str:
    """Returns the NCCL version that torch was built with and the loaded file, or why there is none."""
    if not (torch.distributed.is_available() and torch.distributed.is_nccl_available()):
        return "none: this torch is built without NCCL"
    version = ".".join(map(str, torch.cuda.nccl.version()))
    with open("/proc/self/maps") as maps:
        files = sorted({line.split()[-1] for line in maps if "libnccl" in line})
    return f"{version}: {', '.join(files) or 'inside torch'}"
