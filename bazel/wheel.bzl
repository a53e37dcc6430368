"""One wheel for every Python and every torch: the package's sources and the library, packed without a network."""

def wheel(name, version, package, library, license, readme, version_header):
    """Makes torch_ext-VERSION-py3-none-PLATFORM.whl.

    Args:
      name: the target.
      version: major.minor.patch, checked against the header.
      package: the Python package's files.
      library: libtorch_ext.so.
      license: the license file.
      readme: the long description.
      version_header: the header that has TX_VERSION_*.
    """
    for machine in ["x86_64", "aarch64"]:
        native.genrule(
            name = "%s_%s" % (name, machine),
            srcs = package + [library, license, readme, version_header],
            outs = ["torch_ext-%s-py3-none-linux_%s.whl" % (version, machine)],
            cmd = " ".join([
                "$(execpath //bazel:make_wheel) --out=$@ --version=" + version,
                "--license=$(execpath %s)" % license,
                "--readme=$(execpath %s)" % readme,
                "--header=$(execpath %s)" % version_header,
                "--library=$(execpath %s)" % library,
            ] + ["$(execpath %s)" % file for file in package]),
            target_compatible_with = ["@platforms//cpu:" + machine],
            tools = ["//bazel:make_wheel"],
        )
    native.alias(
        name = name,
        actual = select({
            "@platforms//cpu:x86_64": ":%s_x86_64" % name,
            "@platforms//cpu:aarch64": ":%s_aarch64" % name,
        }),
    )
