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

# Most tests spend more on being compiled than on running; sweeps, *_sweep_test.cc, are the other way round
# (.bazelrc knows them by that name, too).
_MOST_OPTS = ["-O1"]
_SWEEP_OPTS = select({
    "//bazel:sanitized": ["-O1"],
    "//conditions:default": ["-O2"],
})

def core_tests(deps, by_prefix, data_by_prefix = {}, copts = []):
    """One GoogleTest target for each *_test.cc of the folder, linked with the rooms so that internals can be tested.

    Args:
      deps: of every test.
      by_prefix: how a test's name begins -> what it needs besides.
      data_by_prefix: how a test's name begins -> the files that it opens.
      copts: of every test, besides.
    """
    for file in native.glob(["*_test.cc"]):
        name = file[:-len(".cc")]
        data = [each for prefix, opened in data_by_prefix.items() for each in opened if name.startswith(prefix)]
        more = [dep for prefix, labels in by_prefix.items() for dep in labels if name.startswith(prefix)]
        native.cc_test(
            name = name,
            srcs = [file] + native.glob(["*.h", "*.inc"]),
            data = data,
            copts = TEST_OPTS + copts + (_SWEEP_OPTS if name.endswith("_sweep_test") else _MOST_OPTS),
            linkstatic = True,
            # alone, for it takes most of the memory
            tags = ["exclusive"] if "huge" in name else [],
            timeout = "long",
            deps = deps + more + ["@googletest//:gtest_main"],
        )

def mutated_source(name, source, old, new):
    """A C file with a bug: its text `old`, a basic regular expression for sed, is `new`. An error where it is not there.

    Args:
      name: of the genrule; the file is NAME.c.
      source: label of the C file.
      old: what is replaced.
      new: by what.
    """
    native.genrule(
        name = name,
        testonly = True,
        srcs = [source],
        outs = [name + ".c"],
        cmd = "sed 's/%s/%s/' $< >$@ && ! cmp -s $< $@" % (old.replace("$", "$$"), new),
    )

def mutant_test(name, test, source, old, new, finds, deps, tags = []):
    """Passes where a test of the folder fails with a bug in the library, and says what the bug is.

    Args:
      name: of the test.
      test: the test, without ".cc".
      source: see mutated_source.
      old: see mutated_source.
      new: see mutated_source.
      finds: what the test prints then, a basic regular expression.
      deps: of the test.
      tags: of this test.
    """
    mutated_source(name + "_mutant", source, old, new)
    native.cc_library(
        name = name + "_source",
        testonly = True,
        srcs = [name + "_mutant.c"],
        copts = C_OPTS,
        alwayslink = True,
        linkstatic = True,
        tags = ["manual"],
        deps = deps,
    )
    native.cc_binary(
        name = name + "_program",
        testonly = True,
        srcs = [test + ".cc"] + native.glob(["*.h", "*.inc"]),
        copts = TEST_OPTS,
        # The mutant comes before the rooms.
        linkopts = ["-Wl,--allow-multiple-definition"],
        linkstatic = True,
        tags = ["manual"],
        deps = [name + "_source"] + deps + ["@googletest//:gtest_main"],
    )
    native.sh_test(
        name = name,
        srcs = ["finds.sh"],
        args = ["$(rootpath %s_program)" % name, "'%s'" % finds],
        data = [name + "_program"],
        tags = tags,
        # The library's functions come first there.
        target_compatible_with = select({
            "//bazel:sanitized": ["//bazel:nowhere"],
            "//conditions:default": [],
        }),
    )
