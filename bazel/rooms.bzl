"""Macros for folders of C sources ("rooms") and their tests: a new file in the folder needs no rule of its own."""

load("//bazel:copts.bzl", "C_OPTS", "TEST_OPTS")

def room(name, deps = [], exclude = [], copts = C_OPTS, **kwargs):
    """Makes one library of all C files of the folder, and `sources`, the same files for tests that read them.

    Args:
      name: name of the library.
      deps: the rooms below; dependencies go down only.
      exclude: files that the folder's BUILD compiles in another way.
      copts: compiler options.
      **kwargs: further arguments of cc_library.
    """
    native.cc_library(
        name = name,
        srcs = native.glob(["*.c"], exclude = exclude),
        hdrs = native.glob(["*.h"]),
        textual_hdrs = native.glob(["*.def", "*.inc"]),
        copts = copts,
        # Nothing inside the library calls the public functions, but the shared library must keep them.
        alwayslink = True,
        linkstatic = True,
        deps = deps,
        **kwargs
    )
    sources()

def sources():
    """Makes the filegroup `sources`, every file of the folder, for tests that read the sources themselves."""
    native.filegroup(
        name = "sources",
        # Without what tools leave behind.
        srcs = native.glob(["**"], exclude = ["**/__pycache__/**", "**/.*/**"]),
    )

# Most tests take longer to compile than to run, so they are compiled with little optimisation, and with a header that
# is compiled once (bazel/precompiled.bzl). Sweeps, *_sweep_test.cc, take longer to run (.bazelrc selects them by this
# name, too).
LITTLE_OPTIMISATION = select({
    "//bazel:sanitized": ["-O0"],
    "//conditions:default": ["-O1"],
})

# If the header's options are not the test's, gcc reads it again, and says so.
_PRECOMPILED = ["-include", "precompiled_gtest.h", "-Winvalid-pch", "-Wno-error=invalid-pch"]
MOST_OPTS = LITTLE_OPTIMISATION + _PRECOMPILED
MOST_DEPS = ["//tests:precompiled_gtest"]
_SWEEP_OPTS = select({
    "//bazel:sanitized": ["-O1"],
    "//conditions:default": ["-O2"],
})

# Under sanitizers these take longer to run, too.
_BUSY_OPTS = select({
    "//bazel:sanitized": ["-O1"],
    "//conditions:default": ["-O1"] + _PRECOMPILED,
})

def core_tests(deps, by_prefix, data_by_prefix = {}, copts = [], busy = []):
    """Makes one GoogleTest target for each *_test.cc of the folder, linked with the rooms to test internals.

    Args:
      deps: dependencies of every test.
      by_prefix: prefix of test names -> their further dependencies.
      data_by_prefix: prefix of test names -> the files that they open.
      copts: further compiler options of every test.
      busy: names of tests that take longer to run than to compile.
    """
    for name in busy:
        if not native.glob([name + ".cc"]):
            fail("%s.cc is not there" % name)
    for file in native.glob(["*_test.cc"]):
        name = file[:-len(".cc")]
        sweeps = name.endswith("_sweep_test")
        data = [each for prefix, opened in data_by_prefix.items() for each in opened if name.startswith(prefix)]
        more = [dep for prefix, labels in by_prefix.items() for dep in labels if name.startswith(prefix)]
        native.cc_test(
            name = name,
            srcs = [file] + native.glob(["*.h", "*.inc"]),
            data = data,
            copts = TEST_OPTS + copts + (_SWEEP_OPTS if sweeps else _BUSY_OPTS if name in busy else MOST_OPTS),
            linkstatic = True,
            # runs alone, because it takes most of the memory
            tags = ["exclusive"] if "huge" in name else [],
            timeout = "long",
            deps = deps + more + ([] if sweeps else MOST_DEPS) + ["@googletest//:gtest_main"],
        )

def mutated_source(name, source, old, new):
    """Makes a copy of a C file with a planted bug. The build fails if `old` is not in the file.

    Args:
      name: name of the genrule; the file is NAME.c.
      source: label of the C file.
      old: the text to replace, a basic regular expression for sed.
      new: the replacement.
    """
    native.genrule(
        name = name,
        testonly = True,
        srcs = [source],
        outs = [name + ".c"],
        cmd = "sed 's/%s/%s/' $< >$@ && ! cmp -s $< $@" % (old.replace("$", "$$"), new),
    )

def mutant_test(name, test, source, old, new, finds, deps, tags = []):
    """Makes a test that passes if another test of the folder finds a bug that is planted in the library.

    Args:
      name: name of the new test.
      test: the other test, which must fail, without ".cc".
      source: see mutated_source.
      old: see mutated_source.
      new: see mutated_source.
      finds: a basic regular expression for the other test's output when it fails.
      deps: dependencies of the other test.
      tags: tags of the new test.
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
        copts = TEST_OPTS + MOST_OPTS,
        # The mutant's functions are linked before, and instead of, those of the rooms.
        linkopts = ["-Wl,--allow-multiple-definition"],
        linkstatic = True,
        tags = ["manual"],
        deps = [name + "_source"] + deps + MOST_DEPS + ["@googletest//:gtest_main"],
    )
    native.sh_test(
        name = name,
        srcs = ["finds.sh"],
        args = ["$(rootpath %s_program)" % name, "'%s'" % finds],
        data = [name + "_program"],
        tags = tags,
        # With sanitizers the library's own functions would be linked first.
        target_compatible_with = select({
            "//bazel:sanitized": ["//bazel:nowhere"],
            "//conditions:default": [],
        }),
    )
