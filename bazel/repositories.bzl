"""The build's external dependencies, all found on this machine; nothing is downloaded.

A workspace that depends on @torch_ext calls torch_ext_repositories() as well (examples/c does).
"""

load("//bazel:cuda.bzl", "cuda_toolkit")
load("//bazel:nccl.bzl", "nccl")
load("//bazel:python.bzl", "python_with_torch")
load("//bazel:system.bzl", "system_repository", "text_repository")
load("//bazel:version.bzl", "torch_ext_version")

_GOOGLETEST_BUILD = """
cc_library(
    name = "gtest_main",
    srcs = ["src/gtest-all.cc", "src/gtest_main.cc"],
    hdrs = glob(["include/**/*.h"]),
    textual_hdrs = glob(["src/*.cc", "src/*.h"], exclude = ["src/gtest-all.cc", "src/gtest_main.cc"]),
    copts = ["-w", "-O1"],
    includes = [".", "include"],
    linkopts = ["-lpthread"],
    linkstatic = True,
    visibility = ["//visibility:public"],
)
"""

def _native_rules(name, folder, rules, providers = []):
    """Makes @name//folder:defs.bzl, which exports Bazel's native rules and providers of these names."""

    # A .bzl file can't export a built-in under its own name, so native.bzl exports it as Native... first.
    lines = ['load("//%s:native.bzl", _%s = "Native%s")' % (folder, each, each) for each in providers]
    lines += ["%s = _%s" % (each, each) for each in providers]
    lines += ["%s = native.%s" % (each, each) for each in rules]
    text_repository(
        name = name,
        files = {
            "BUILD": "",
            folder + "/BUILD": "",
            folder + "/defs.bzl": "\n".join(lines),
            folder + "/native.bzl": "\n".join(["Native%s = %s" % (each, each) for each in providers]),
        },
    )

def torch_ext_repositories():
    # Bazel's own tools load these rule repositories, and a coverage target, even if nothing uses them. The packaged and
    # published versions are too new or too old for some Bazel. So these repositories forward to the native rules.
    _native_rules("rules_cc", "cc", [
        "cc_binary",
        "cc_import",
        "cc_library",
        "cc_proto_library",
        "cc_test",
        "cc_toolchain",
        "cc_toolchain_suite",
        "fdo_prefetch_hints",
        "fdo_profile",
        "objc_import",
        "objc_library",
    ])
    _native_rules("rules_java", "java", [
        "java_binary",
        "java_import",
        "java_library",
        "java_lite_proto_library",
        "java_package_configuration",
        "java_plugin",
        "java_proto_library",
        "java_runtime",
        "java_test",
        "java_toolchain",
    ])
    _native_rules("rules_proto", "proto", [
        "proto_lang_toolchain",
        "proto_library",
    ], providers = ["ProtoInfo"])
    text_repository(
        name = "remote_coverage_tools",
        files = {"BUILD": "filegroup(name = 'coverage_report_generator', visibility = ['//visibility:public'])"},
    )
    system_repository(
        name = "googletest",
        build = _GOOGLETEST_BUILD,
        package = "libgtest-dev",
        path = "/usr/src/googletest/googletest",
    )
    cuda_toolkit(name = "cuda_toolkit")
    nccl(name = "nccl")
    python_with_torch(name = "python_with_torch")
    torch_ext_version(name = "torch_ext_version")
    native.register_toolchains("@python_with_torch//:toolchain")
