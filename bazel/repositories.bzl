"""Everything the build needs from outside, found on this machine; nothing is downloaded.

A workspace that depends on @torch_ext calls torch_ext_repositories() as well (examples/c does).
"""

load("//bazel:cuda.bzl", "cuda_toolkit")
load("//bazel:nccl.bzl", "nccl")
load("//bazel:python.bzl", "python_with_torch")
load("//bazel:system.bzl", "system_repository", "text_repository")

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

def torch_ext_repositories():
    # Bazel's own tools load rules_cc and a coverage target even where nobody uses them. Debian's rules_cc is too new
    # for Debian's Bazel, so a few lines stand in for both; the native rules do the work.
    text_repository(
        name = "rules_cc",
        files = {
            "BUILD": "",
            "cc/BUILD": "",
            "cc/defs.bzl": "\n".join(
                ["%s = native.%s" % (rule, rule) for rule in [
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
                ]],
            ),
        },
    )
    text_repository(
        name = "remote_coverage_tools",
        files = {"BUILD": "filegroup(name = 'coverage_report_generator', visibility = ['//visibility:public'])"},
    )
    system_repository(
        name = "rules_java",
        package = "bazel-rules-java",
        path = "/usr/share/bazel/rules/java",
    )
    system_repository(
        name = "rules_proto",
        package = "bazel-rules-proto",
        path = "/usr/share/bazel/rules/proto",
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
    native.register_toolchains("@python_with_torch//:toolchain")
