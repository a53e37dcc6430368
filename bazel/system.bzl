"""Repository rules: one for folders that the operating system's packages install, one for generated files."""

def _system_repository_impl(ctx):
    source = ctx.path(ctx.attr.path)
    if not source.exists:
        fail("%s not found: install the package %s (tests/run.sh and examples/run.sh do)." % (ctx.attr.path, ctx.attr.package))
    for entry in source.readdir():
        if entry.basename not in ["WORKSPACE", "BUILD"]:
            ctx.symlink(entry, entry.basename)
    ctx.file("WORKSPACE", "workspace(name = %r)\n" % ctx.name)
    if ctx.attr.build:
        ctx.file("BUILD", ctx.attr.build)
    elif source.get_child("BUILD").exists:
        ctx.symlink(source.get_child("BUILD"), "BUILD")

# A repository from a folder that an operating system's package installs. `build` replaces its top-level BUILD file.
system_repository = repository_rule(
    implementation = _system_repository_impl,
    local = True,
    attrs = {
        "path": attr.string(mandatory = True),
        "package": attr.string(mandatory = True),
        "build": attr.string(),
    },
)

def _text_repository_impl(ctx):
    ctx.file("WORKSPACE", "workspace(name = %r)\n" % ctx.name)
    for path, text in ctx.attr.files.items():
        ctx.file(path, text)

# A repository that consists of the given files: path -> text.
text_repository = repository_rule(
    implementation = _text_repository_impl,
    attrs = {"files": attr.string_dict(mandatory = True)},
)
