"""One py_test for each test_*.py of a folder, run by tests/pytest_main.py."""

load("//bazel:rooms.bzl", "sources")

def pytest_files(data = [], data_of = {}, threads = 2):
    """Tests see the repository's layout: the package, the library and the files below at their places.

    Args:
      data: what every test reads besides.
      data_of: test name -> what it alone reads.
      threads: of torch's pool in one process.
    """
    helpers = native.glob(["*.py"], exclude = ["test_*.py"])
    for file in native.glob(["test_*.py"]):
        name = file[:-len(".py")]
        native.py_test(
            name = name,
            srcs = [file, "//tests:pytest_main.py"] + helpers,
            args = ["$(rootpath %s)" % file],
            data = data + data_of.get(name, []),
            env = {"OMP_NUM_THREADS": str(threads)},
            main = "//tests:pytest_main.py",
            timeout = "long",
            deps = ["//:torch_ext", "//tests:helpers"],
        )
    sources()
