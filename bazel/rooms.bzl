"""The shape that every folder of C sources has: drop a file in and it is built."""

load("//bazel:copts.bzl", "C_OPTS", "TEST_OPTS")

def room(name, deps = [], exclude = [], copts = C_OPTS, **kwargs):
    """All C files of the folder as one library; `sources` are the same files for the tests that read them.

    Args:
      name: the library.
      deps: the rooms below; arrows go down only.
      exclude: files that the folder's BUILD compiles in another way.
      copts: compiler options.
      **kwargs: for cc_library.
    """
    native.cc_library(
        name = name,
        srcs = native.glob(["*.c"], exclude = exclude),
        hdrs = native.glob(["*.h"]),
        textual_hdrs = native.glob(["*.def", "*.inc"]),
        copts = copts,
        # Nothing inside the library calls the public functions, and a shared library must keep them.
        alwayslink = True,
        linkstatic = True,
        deps = deps,
        **kwargs
    )
    sources()

def sources():
    """Every file of the folder, for the tests that look at the sources themselves."""
    native.filegroup(
        name = "sources",
        # Without what tools leave behind.
        srcs = native.glob(["**"], exclude = ["**/__pycache__/**", "**/.*/**"]),
    )

# Most tests spend more on being compiled, checks included, than on running; sweeps are the other way round.
_MOST_OPTS = select({
    "//bazel:sanitized": ["-O0"],
    "//conditions:default": ["-O1"],
})
_SWEEP_OPTS = select({
    "//bazel:sanitized": ["-O1"],
    "//conditions:default": ["-O2"],
})

def core_tests(deps, by_prefix, sweeps = [], data_by_prefix = {}, copts = []):
    """One GoogleTest target for each *_test.cc of the folder, linked with the rooms so that internals can be tested.

    Args:
      deps: of every test.
      by_prefix: how a test's name begins -> what it needs besides.
      sweeps: names of the tests that go through all patterns and want an optimised loop.
      data_by_prefix: how a test's name begins -> the files that it opens.
      copts: of every test, besides.
    """
    files = native.glob(["*_test.cc"])
    for name in sweeps:
        if name + ".cc" not in files:
            fail("%s.cc is not there" % name)
    for file in files:
        name = file[:-len(".cc")]
        data = [each for prefix, opened in data_by_prefix.items() for each in opened if name.startswith(prefix)]
        more = [dep for prefix, labels in by_prefix.items() for dep in labels if name.startswith(prefix)]
        native.cc_test(
            name = name,
            srcs = [file] + native.glob(["*.h", "*.inc"]),
            data = data,
            copts = TEST_OPTS + copts + (_SWEEP_OPTS if name in sweeps else _MOST_OPTS),
            linkstatic = True,
            # alone, for it takes most of the memory
            tags = ["exclusive"] if "huge" in name else [],
            timeout = "long",
            deps = deps + more + ["@googletest//:gtest_main"],
        )
