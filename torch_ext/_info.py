"""What was found on this machine, for people: `python -m torch_ext info`."""

import ctypes
import platform
from collections.abc import Iterator

import torch

from torch_ext import _library


def text() -> str:
    """One line per fact, in columns."""
    facts = list(_facts())
    width = max(len(name) for name, _ in facts)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in facts)


def _facts() -> Iterator[tuple[str, str]]:
    yield "torch_ext", version()
    yield "library", _library.library_path()
    yield "torch", f"{torch.__version__} ({'.'.join(torch.__path__)})"
    yield "python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    yield "instruction sets", f"{', '.join(isas())}; in use: {selected_isa()}"
    yield "threads", f"{torch.get_num_threads()} (torch.get_num_threads)"
    yield "operators", ", ".join(_library.operators())
    yield "CUDA", cuda()


def version() -> str:
    """Of the library that is loaded: "0.1.0"."""
    number = _library.function("tx_version", restype=ctypes.c_uint32)()
    return f"{number >> 16}.{number >> 8 & 0xFF}.{number & 0xFF}"


def isas() -> list[str]:
    """The instruction sets that the library was built for and this processor has, slowest first."""
    name_of = _library.function("tx_isa_name", ctypes.c_int32, restype=ctypes.c_char_p)
    names: list[str] = []
    while name := name_of(len(names)):
        names.append(name.decode())
    return names


def selected_isa() -> str:
    """The one of them that steps run on."""
    value = _library.function("tx_isa_selected", restype=ctypes.c_char_p)()
    return value.decode() if value else "none"


def cuda() -> str:
    """Why there is none, or the devices that torch sees."""
    if not torch.backends.cuda.is_built():
        return "none: this torch is built without CUDA"
    if not torch.cuda.is_available():
        return "none: torch finds no device or no driver"
    devices = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
    return f"{devices}; the operators run on the CPU only"
