"""One py_test for each test_*.py of a folder, run by tests/pytest_main.py."""

load("//bazel:rooms.bzl", "sources")

def pytest_files(data = [], timeout = "moderate", tags = []):
    """Tests see the repository's layout: the package, the library, the examples and the oracle at their places.

    Args:
      data: what the tests read besides.
      timeout: of each file.
      tags: of each file.
    """
    helpers = native.glob(["*.py"], exclude = ["test_*.py"])
    for file in native.glob(["test_*.py"]):
        native.py_test(
            name = file[:-len(".py")],
            srcs = [file, "//tests:pytest_main.py"] + helpers,
            args = ["$(rootpath %s)" % file],
            data = data,
            main = "//tests:pytest_main.py",
            tags = tags,
            timeout = timeout,
            deps = ["//:torch_ext", "//tests:helpers"],
        )
    sources()
