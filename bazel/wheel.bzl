"""One wheel for every Python and every torch: the package's sources and the library, packed without a network."""

load("@torch_ext_version//:version.bzl", "VERSION")

_MACHINES = ["aarch64", "x86_64"]

# The libraries need no newer glibc than 2.34, which Debian 12, Ubuntu 22.04 and RHEL 9 have; a test checks that.
_PLATFORM = "manylinux_2_34"

def wheel(name, package, libraries, headers, license, readme, pyproject, version_header):
    """Makes torch_ext-VERSION-py3-none-PLATFORM.whl.

    Args:
      name: the target.
      package: the Python package's files.
      libraries: labels of libtorch_ext.so, libtorch_ext_cuda.so if it is built, and libtorch_ext_delta.so.
      headers: label of the headers for C and C++ programs, which are installed in torch_ext/include.
      license: the license file.
      readme: the long description.
      pyproject: pyproject.toml, which has the metadata.
      version_header: the header that has TX_VERSION_*.
    """
    for machine in _MACHINES:
        native.genrule(
            name = "%s_%s" % (name, machine),
            srcs = package + libraries + [headers, license, readme, pyproject, version_header],
            outs = ["torch_ext-%s-py3-none-%s_%s.whl" % (VERSION, _PLATFORM, machine)],
            cmd = " ".join([
                "$(execpath //bazel:make_wheel) --out=$@",
                "--license=$(execpath %s)" % license,
                "--readme=$(execpath %s)" % readme,
                "--pyproject=$(execpath %s)" % pyproject,
                "--header=$(execpath %s)" % version_header,
                "--headers $(execpaths %s)" % headers,
                "--libraries",
            ] + ["$(execpaths %s)" % library for library in libraries] + [
                "--files",
            ] + ["$(execpath %s)" % file for file in package]),
            # Only one is for this machine: `name` below.
            tags = ["manual"],
            tools = ["//bazel:make_wheel"],
        )
    native.alias(
        name = name,
        actual = select({"//bazel:" + machine: ":%s_%s" % (name, machine) for machine in _MACHINES}),
    )
