"""Finds the Python interpreter that has torch. It runs the tests, and the C declarations are checked against its torch
headers. The library itself needs neither.

Searched in this order: $TORCH_EXT_PYTHON, the repository's .venv (created by tests/run.sh and examples/run.sh), python3
on the PATH. If the interpreter has no torch, everything still builds except the targets that need torch's headers.
"""

# Prints the interpreter's path and the folder of the installed torch (empty: no torch), without importing torch.
_PROBE = """
import importlib.util, os, sys
spec = importlib.util.find_spec("torch")
print(sys.executable)
print(os.path.dirname(spec.origin) if spec and spec.origin else "")
"""

_BUILD = """
load("@bazel_tools//tools/python:toolchain.bzl", "py_runtime_pair")

package(default_visibility = ["//visibility:public"])

py_runtime(
    name = "runtime",
    interpreter_path = {interpreter},
    python_version = "PY3",
    stub_shebang = "#!/usr/bin/env python3",
)

py_runtime_pair(
    name = "runtime_pair",
    py3_runtime = ":runtime",
)

toolchain(
    name = "toolchain",
    toolchain = ":runtime_pair",
    toolchain_type = "@bazel_tools//tools/python:toolchain_type",
)
"""

# torch's headers, for C++ tests that compare our declarations with them: only those that the shims and DLPack need.
_HEADERS = """
cc_library(
    name = "torch_headers",
    hdrs = glob([
        "include/ATen/dlpack.h",
        "include/c10/**/*.h",
        "include/torch/csrc/inductor/aoti_torch/**/*.h",
        "include/torch/csrc/stable/**/*.h",
        "include/torch/headeronly/**/*.h",
    ]),
    includes = ["include"],
)
"""

_NO_HEADERS = """
genrule(
    name = "no_torch",
    outs = ["no_torch.h"],
    cmd = "echo '{message}' >&2; exit 1",
)

cc_library(
    name = "torch_headers",
    hdrs = [":no_torch"],
)
"""

def python_candidate(ctx):
    """Returns the interpreter's path, for a repository rule."""
    named = ctx.os.environ.get("TORCH_EXT_PYTHON")
    if named:
        if not ctx.path(named).exists:
            fail("TORCH_EXT_PYTHON names %s, which does not exist." % named)
        return named
    venv = ctx.path(Label("//:WORKSPACE")).dirname.get_child(".venv").get_child("bin").get_child("python")
    if venv.exists:
        return str(venv)
    return ctx.which("python3") or fail("No python3 on the PATH; set TORCH_EXT_PYTHON to an interpreter that has torch.")

def _python_with_torch_impl(ctx):
    probe = ctx.execute([python_candidate(ctx), "-c", _PROBE])
    if probe.return_code != 0:
        fail("%s does not run: %s" % (python_candidate(ctx), probe.stderr))
    interpreter, torch = probe.stdout.split("\n")[:2]
    build = _BUILD.format(interpreter = repr(interpreter))
    if torch:
        ctx.symlink(torch + "/include", "include")
        build += _HEADERS
    else:
        build += _NO_HEADERS.format(message = "%s has no torch; run tests/run.sh or set TORCH_EXT_PYTHON." % interpreter)
    ctx.file("WORKSPACE", "workspace(name = %r)\n" % ctx.name)
    ctx.file("BUILD", build)

python_with_torch = repository_rule(
    implementation = _python_with_torch_impl,
    environ = ["TORCH_EXT_PYTHON", "PATH"],
    local = True,
)
