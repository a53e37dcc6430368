"""Finds NVIDIA's nccl.h, with which a test compares our declarations of NCCL: @nccl//:headers. Without it everything
builds, and that test is skipped and says so.

Searched in this order: $NCCL_HOME/include, the Python environment that has torch (nvidia-nccl-cu13, nvidia-nccl-cu12),
the system's folders.
"""

load("//bazel:python.bzl", "python_candidate")

_PROBE = """
import importlib.util
spec = importlib.util.find_spec("nvidia")
print([folder for folder in spec.submodule_search_locations][0] if spec else "")
"""

# The parts of CUDA's headers that nccl.h needs: the type of a stream.
_CUDA = {
    "cuda_runtime.h": """
#pragma once
#include <stddef.h>
#define CUDART_VERSION 13000
typedef struct CUstream_st *cudaStream_t;
""",
    "cuda_bf16.h": "",
    "cuda_fp16.h": "",
    "cuda_fp8.h": "",
}

def _nccl_impl(ctx):
    folders = []
    if ctx.os.environ.get("NCCL_HOME"):
        folders.append(ctx.os.environ["NCCL_HOME"] + "/include")
    probe = ctx.execute([python_candidate(ctx), "-c", _PROBE])
    if probe.return_code == 0 and probe.stdout.strip():
        folders.append(probe.stdout.strip() + "/nccl/include")
    folders += ["/usr/include", "/usr/local/cuda/include"]
    found = [folder for folder in folders if ctx.path(folder + "/nccl.h").exists][:1]
    ctx.file("WORKSPACE", "workspace(name = %r)\n" % ctx.name)
    for folder in found:
        ctx.symlink(folder + "/nccl.h", "include/nccl.h")
        for name, text in _CUDA.items():
            ctx.file("include/" + name, text)
    ctx.file("BUILD", """
cc_library(
    name = "headers",
    hdrs = glob(["include/*.h"]),
    includes = ["include"],
    visibility = ["//visibility:public"],
)
""")

nccl = repository_rule(
    implementation = _nccl_impl,
    environ = ["NCCL_HOME", "TORCH_EXT_PYTHON", "PATH"],
    local = True,
)
