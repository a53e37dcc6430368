"""Makes @torch_ext_version//:version.bzl: VERSION, major.minor.patch, from TX_VERSION_* in csrc/torch_ext_types.h."""

def _version_of(header):
    number = {}
    for line in header.split("\n"):
        words = [word for word in line.split(" ") if word]
        if len(words) == 3 and words[0] == "#define" and words[1].startswith("TX_VERSION_"):
            number[words[1][len("TX_VERSION_"):]] = words[2]
    return ".".join([number[part] for part in ["MAJOR", "MINOR", "PATCH"]])

def _torch_ext_version_impl(ctx):
    version = _version_of(ctx.read(Label("//csrc:torch_ext_types.h")))
    ctx.file("WORKSPACE", "workspace(name = %r)\n" % ctx.name)
    ctx.file("BUILD", "")
    ctx.file("version.bzl", '"""The version of torch_ext."""\n\nVERSION = %r\n' % version)

torch_ext_version = repository_rule(implementation = _torch_ext_version_impl)
