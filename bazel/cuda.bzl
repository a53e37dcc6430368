"""Finds the CUDA compiler: @cuda_toolkit//:nvcc, a target that only exists where nvcc does.

Everything else builds without it; tests/run.sh says so.
"""

def _cuda_toolkit_impl(ctx):
    home = ctx.os.environ.get("CUDA_HOME", "/usr/local/cuda")
    nvcc = ctx.path(home + "/bin/nvcc")
    if not nvcc.exists:
        nvcc = ctx.which("nvcc")  # None where there is none
    ctx.file("WORKSPACE", "workspace(name = %r)\n" % ctx.name)

    if nvcc:
        ctx.symlink(nvcc, "nvcc")
    ctx.file("BUILD", "exports_files(['nvcc'])\n" if nvcc else "")

cuda_toolkit = repository_rule(
    implementation = _cuda_toolkit_impl,
    environ = ["CUDA_HOME", "PATH"],
    local = True,
)
