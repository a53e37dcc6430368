"""One wheel for every Python and every torch: the package's sources and the library, packed without a network."""

_MACHINES = ["aarch64", "x86_64"]

def wheel(name, version, package, libraries, license, readme, version_header):
    """Makes torch_ext-VERSION-py3-none-PLATFORM.whl.

    Args:
      name: the target.
      version: major.minor.patch, checked against the header.
      package: the Python package's files.
      libraries: libtorch_ext.so, and libtorch_ext_cuda.so where it is built.
      license: the license file.
      readme: the long description.
      version_header: the header that has TX_VERSION_*.
    """
    for machine in _MACHINES:
        native.genrule(
            name = "%s_%s" % (name, machine),
            srcs = package + libraries + [license, readme, version_header],
            outs = ["torch_ext-%s-py3-none-linux_%s.whl" % (version, machine)],
            cmd = " ".join([
                "$(execpath //bazel:make_wheel) --out=$@ --version=" + version,
                "--license=$(execpath %s)" % license,
                "--readme=$(execpath %s)" % readme,
                "--header=$(execpath %s)" % version_header,
            ] + ["--library=$(execpath %s)" % library for library in libraries] +
                           ["$(execpath %s)" % file for file in package]),
            # One of them is right for the machine at hand: `name`.
            tags = ["manual"],
            tools = ["//bazel:make_wheel"],
        )
    native.alias(
        name = name,
        actual = select({"//bazel:" + machine: ":%s_%s" % (name, machine) for machine in _MACHINES}),
    )
