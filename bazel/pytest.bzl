"""Makes py_tests from the test_*.py of a folder, run by tests/pytest_main.py."""

load("//bazel:rooms.bzl", "sources")

def _environment(threads):
    """Returns the environment of tests whose torch has so many threads. Threads that wait for each other sleep: as many
    tests run at a time as there are cores, and a thread that spins takes the core from which it waits for something."""
    return {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "passive"}

def pytest_files(data = [], data_of = {}, threads = 2, groups = 0, alone = [], exclusive = []):
    """Makes one py_test for each test_*.py, with its name.

    With `groups` it also makes targets that run several files in one process, because importing torch takes longer than
    many files do. `//...` then means the groups and the files that are in no group. Tests see the repository's layout:
    the package, the library and the data files at their usual paths.

    Args:
      data: files that every test reads.
      data_of: test name -> files that only this test reads.
      threads: size of torch's thread pool in one process.
      groups: number of groups; files are assigned to them in turn.
      alone: names of tests that are in no group.
      exclusive: names of tests that are in no group and run while no other test runs, because they depend on timing.
    """
    names = [file[:-len(".py")] for file in native.glob(["test_*.py"])]
    for name in alone + exclusive:
        if name not in names:
            fail("%s.py is not there" % name)
    grouped = [name for name in names if groups and name not in alone + exclusive]
    for name in names:
        tags = ["manual"] if name in grouped else ["exclusive"] if name in exclusive else []
        _pytest(name, [name], data + data_of.get(name, []), threads, tags)
    for i in range(groups):
        members = grouped[i::groups]
        more = [label for name in members for label in data_of.get(name, [])]
        _pytest("group_%d" % (i + 1), members, data + more, threads, [])
    sources()

def _pytest(name, members, data, threads, tags):
    files = [member + ".py" for member in members]
    native.py_test(
        name = name,
        srcs = files + ["//tests:pytest_main.py"] + native.glob(["*.py"], exclude = ["test_*.py"]),
        args = ["$(rootpath %s)" % file for file in files],
        data = data,
        env = _environment(threads),
        main = "//tests:pytest_main.py",
        tags = tags,
        timeout = "long",
        deps = ["//:torch_ext", "//tests:helpers", "//tests/bench:measures"],
    )

def sanitized_pytest(name, members, data = []):
    """Runs tests of the folder in one process by tests/sanitized_main.py. Not part of `//...`: needs --config=asan.

    Args:
      name: name of the py_test.
      members: names of the tests.
      data: files that they read.
    """
    files = [member + ".py" for member in members]
    native.py_test(
        name = name,
        srcs = files + ["//tests:pytest_main.py", "//tests:sanitized_main.py"] +
               native.glob(["*.py"], exclude = ["test_*.py"]),
        args = ["$(rootpath %s)" % file for file in files],
        data = data,
        env = _environment(2),
        main = "//tests:sanitized_main.py",
        tags = ["manual"],
        timeout = "long",
        deps = ["//:torch_ext_on_host", "//tests:helpers"],
    )
