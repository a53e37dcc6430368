"""Rules for CUDA sources: compiled by nvcc for devices, or by the host's compiler for tests without a GPU."""

load("//bazel:copts.bzl", "TEST_OPTS")

# Compute capabilities with machine code, ascending. The PTX of the last one is for later GPUs.
ARCHITECTURES = [80, 90, 100]

# The same arithmetic as bazel/copts.bzl sets for the host: no contraction, subnormals kept, division and square root
# rounded to nearest.
_ARITHMETIC = ["--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true"]

def _generate(architectures):
    return [
        "-gencode=arch=compute_%d,code=%s" % (a, "[sm_%d,compute_%d]" % (a, a) if a == ARCHITECTURES[-1] else "sm_%d" % a)
        for a in architectures
    ]

def _nvcc_objects_impl(ctx):
    folder = ctx.attr.folder + "/" if ctx.attr.folder else ""
    headers = depset(ctx.files.hdrs, transitive = [dep[CcInfo].compilation_context.headers for dep in ctx.attr.deps])
    objects = []
    for source in ctx.files.srcs:
        object = ctx.actions.declare_file(folder + source.basename[:-len(".cu")] + ".cu.o")
        objects.append(object)
        ctx.actions.run(
            executable = ctx.executable._nvcc,
            arguments = _ARITHMETIC + _generate(ctx.attr.architectures) + ["-D" + each for each in ctx.attr.defines] + [
                "-std=c++17",
                "-O3",
                # Makes the wheel a quarter smaller. Drivers that run this toolkit's code can read it.
                "--compress-mode=size",
                "-I.",
                "-Icsrc",
                "-Xcompiler=-fPIC,-fvisibility=hidden,-fno-exceptions,-fno-threadsafe-statics,-Wall,-Wextra,-Werror",
                "-Werror=all-warnings",
                "-c",
                source.path,
                "-o",
                object.path,
            ],
            inputs = depset([source], transitive = [headers]),
            mnemonic = "Nvcc",
            outputs = [object],
            progress_message = "Compiling %s for the GPU" % source.short_path,
            tools = [ctx.executable._nvcc],
            use_default_shell_env = True,
        )
    return [DefaultInfo(files = depset(objects))]

nvcc_objects = rule(
    implementation = _nvcc_objects_impl,
    doc = "Compiles each .cu file to one object for all `architectures`, in the subfolder `folder` if it is given.",
    attrs = {
        "srcs": attr.label_list(allow_files = [".cu"]),
        "hdrs": attr.label_list(allow_files = True),
        "architectures": attr.int_list(default = ARCHITECTURES),
        "defines": attr.string_list(),
        "folder": attr.string(),
        "deps": attr.label_list(providers = [CcInfo]),
        "_nvcc": attr.label(
            default = "@cuda_toolkit//:nvcc",
            allow_single_file = True,
            cfg = "host",
            executable = True,
        ),
    },
)

def emulated_cuda(name, srcs, hdrs, deps, runtime):
    """Compiles .cu files as C++ for the host, with `runtime` in place of CUDA's runtime.

    Args:
      name: name of the cc_library.
      srcs: .cu files.
      hdrs: headers that they include in addition to those of deps.
      deps: the same as for the device's objects.
      runtime: a cc_library with a cuda_runtime.h.
    """
    for source in srcs:
        native.genrule(
            name = "%s_%s" % (name, source),
            srcs = [source],
            outs = ["%s_%s.cc" % (name, source[:-len(".cu")])],
            cmd = "echo '#include \"$(location %s)\"' >$@" % source,
        )
    native.cc_library(
        name = name,
        testonly = True,
        srcs = ["%s_%s.cc" % (name, source[:-len(".cu")]) for source in srcs],
        hdrs = hdrs,
        copts = TEST_OPTS + [
            "-O2",
            "-fno-strict-aliasing",
            "-Wno-unknown-pragmas",
            "-D__CUDA_ARCH_LIST__=%s" % ",".join(["%d" % (10 * a) for a in ARCHITECTURES]),
        ],
        linkstatic = True,
        alwayslink = True,
        textual_hdrs = srcs,
        deps = deps + [runtime],
        visibility = ["//visibility:public"],
    )
