"""Finds the CUDA toolkit. @cuda_toolkit//:found.bzl says whether it was found. Then @cuda_toolkit//:nvcc is its
compiler and @cuda_toolkit//:cudart its runtime as a static library.

Without it everything else still builds; tests/run.sh says so. TORCH_EXT_CUDA=0 in the environment ignores an installed
toolkit, TORCH_EXT_CUDA=1 makes a missing one an error.
"""

# nvcc looks for its parts next to itself, so it is called at its own path. It names temporary files by its process id,
# which is the same in every sandbox: two nvcc at a time, or one after another was killed, would use the same files.
# Therefore each call gets a temporary folder.
_NVCC = """#!/bin/sh
TMPDIR=$(mktemp -d) || exit
export TMPDIR
trap 'rm -rf "$TMPDIR"' EXIT
{nvcc} "$@"
"""

_BUILD = """
package(default_visibility = ["//visibility:public"])

exports_files(["nvcc"])

cc_library(
    name = "cudart",
    srcs = ["libcudart_static.a"],
    linkopts = ["-ldl", "-lrt", "-lpthread"],
)
"""

def _cuda_toolkit_impl(ctx):
    wanted = ctx.os.environ.get("TORCH_EXT_CUDA", "")
    if wanted not in ["", "0", "1"]:
        fail("TORCH_EXT_CUDA is %r; 0 (no CUDA library), 1 (needed) and nothing (where nvcc is found) are legal" % wanted)
    home = ctx.os.environ.get("CUDA_HOME", "/usr/local/cuda")
    nvcc = ctx.path(home + "/bin/nvcc")
    if not nvcc.exists:
        nvcc = ctx.which("nvcc")  # None where there is none
    runtime = None
    if nvcc:
        nvcc = ctx.path(nvcc).realpath
        for folder in ["lib64", "lib"]:
            candidate = nvcc.dirname.dirname.get_child(folder).get_child("libcudart_static.a")
            if candidate.exists and not runtime:
                runtime = candidate
    if wanted == "1" and not (nvcc and runtime):
        fail("TORCH_EXT_CUDA=1, but %s: install the CUDA toolkit or set CUDA_HOME" % (
            "nvcc has no libcudart_static.a next to it" if nvcc else "nvcc was not found"
        ))
    found = bool(nvcc and runtime) and wanted != "0"
    ctx.file("WORKSPACE", "workspace(name = %r)\n" % ctx.name)
    ctx.file("found.bzl", '"""Whether there is a CUDA toolkit."""\n\nCUDA_FOUND = %s\n' % found)
    ctx.file("BUILD", _BUILD if found else "")
    if found:
        ctx.file("nvcc", _NVCC.format(nvcc = nvcc), executable = True)
        ctx.symlink(runtime, "libcudart_static.a")

cuda_toolkit = repository_rule(
    implementation = _cuda_toolkit_impl,
    environ = ["CUDA_HOME", "PATH", "TORCH_EXT_CUDA"],
    local = True,
)
