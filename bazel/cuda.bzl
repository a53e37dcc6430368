"""Finds the CUDA compiler. Where there is none everything else builds, and the CUDA targets are skipped with a message."""

def _cuda_toolkit_impl(ctx):
    home = ctx.os.environ.get("CUDA_HOME", "/usr/local/cuda")
    nvcc = ctx.path(home + "/bin/nvcc")
    if not nvcc.exists:
        nvcc = ctx.which("nvcc")
    ctx.file("WORKSPACE", "workspace(name = %r)\n" % ctx.name)

    # The empty string means: not found.
    ctx.file("nvcc.bzl", "NVCC = %r\n" % str(nvcc or ""))
    ctx.file("BUILD", "")

cuda_toolkit = repository_rule(
    implementation = _cuda_toolkit_impl,
    environ = ["CUDA_HOME", "PATH"],
    local = True,
)
