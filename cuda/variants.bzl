"""The library for GPUs, and builds of it that differ in what the step's kernels have (variants.h)."""

load("//bazel:nvcc.bzl", "nvcc_objects")

# Name -> what is defined. The ordinary library has what variants.h says.
VARIANTS = {
    "plain": ["TX_CUDA_USUAL=0", "TX_CUDA_SECTORS=0"],
    "usual": ["TX_CUDA_USUAL=1", "TX_CUDA_SECTORS=0"],
    "sectors": ["TX_CUDA_USUAL=0", "TX_CUDA_SECTORS=1"],
}

# Of the machines that compare them: H100 and H200.
_ARCHITECTURES = [90]

def cuda_library(name, objects, deps, tags = []):
    native.cc_binary(
        name = name,
        srcs = objects,
        linkopts = [
            "-Wl,-soname,libtorch_ext_cuda.so",
            "-Wl,--version-script,$(location exports_cuda.lds)",
            "-Wl,--no-undefined",
            "-Wl,--as-needed",
            # The names of the CUDA runtime's own functions: 360 KB that nobody reads.
            "-Wl,--strip-all",
        ],
        linkshared = True,
        tags = tags,
        deps = deps + [
            "exports_cuda.lds",
            "@cuda_toolkit//:cudart",
        ],
    )

def cuda_variants(name, srcs, varied, hdrs, deps):
    """bazel build //cuda:NAME: NAME/VARIANT.so for each of VARIANTS, for tests/gpu.sh.

    Args:
      name: of them all, and their folder.
      srcs: .cu files, all of them.
      varied: those that the defines are for; the others are compiled once.
      hdrs: what they include in addition to deps.
      deps: as of the library.
    """
    tags = ["manual"]
    nvcc_objects(
        name = name + "_same",
        srcs = [source for source in srcs if source not in varied],
        hdrs = hdrs,
        architectures = _ARCHITECTURES,
        folder = name + "_same",
        tags = tags,
        deps = deps,
    )
    for variant, defines in VARIANTS.items():
        objects = "%s_%s" % (name, variant)
        nvcc_objects(
            name = objects,
            srcs = varied,
            hdrs = hdrs,
            architectures = _ARCHITECTURES,
            defines = defines,
            folder = objects,
            tags = tags,
            deps = deps,
        )
        cuda_library("%s/%s.so" % (name, variant), [objects, name + "_same"], deps, tags)
    native.filegroup(
        name = name,
        srcs = ["%s/%s.so" % (name, variant) for variant in VARIANTS],
        tags = tags,
    )
