"""A header that the compiler reads once for all tests, instead of once for each.

GoogleTest and the standard library take most of the time of compiling a test. gcc uses NAME.h.gch, which it finds beside
NAME.h, for a source that is compiled with the same options, and else reads NAME.h: what is built is the same.
"""

load("@bazel_tools//tools/build_defs/cc:action_names.bzl", "CPP_COMPILE_ACTION_NAME")
load("@bazel_tools//tools/cpp:toolchain_utils.bzl", "find_cpp_toolchain")

def _precompiled_header_impl(ctx):
    header = ctx.actions.declare_file(ctx.label.name + "/" + ctx.label.name + ".h")
    ctx.actions.write(header, "".join(["#include <%s>\n" % name for name in ctx.attr.headers]))
    toolchain = find_cpp_toolchain(ctx)
    made = [header]
    context = cc_common.merge_cc_infos(cc_infos = [dep[CcInfo] for dep in ctx.attr.deps]).compilation_context
    if "gcc" in toolchain.compiler_executable:  # clang ends with an error where gcc reads the header instead
        made.append(_compile(ctx, toolchain, header, context))
    return [
        DefaultInfo(files = depset(made)),
        CcInfo(compilation_context = cc_common.create_compilation_context(
            headers = depset(made),
            includes = depset([header.dirname]),
        )),
    ]

def _compile(ctx, toolchain, header, context):
    """Returns the file NAME.h.gch."""
    compiled = ctx.actions.declare_file(header.basename + ".gch", sibling = header)
    features = cc_common.configure_features(
        ctx = ctx,
        cc_toolchain = toolchain,
        requested_features = ctx.features,
        unsupported_features = ctx.disabled_features,
    )
    options = cc_common.get_memory_inefficient_command_line(
        feature_configuration = features,
        action_name = CPP_COMPILE_ACTION_NAME,
        variables = cc_common.create_compile_variables(
            feature_configuration = features,
            cc_toolchain = toolchain,
            include_directories = depset(transitive = [context.includes, context.system_includes]),
            quote_include_directories = context.quote_includes,
            use_pic = True,
            user_compile_flags = ctx.attr.copts,
        ),
    )
    ctx.actions.run(
        executable = cc_common.get_tool_for_action(feature_configuration = features, action_name = CPP_COMPILE_ACTION_NAME),
        arguments = options + ["-x", "c++-header", header.path, "-o", compiled.path],
        inputs = depset([header], transitive = [context.headers, toolchain.all_files]),
        outputs = [compiled],
        mnemonic = "PrecompileHeader",
        progress_message = "Precompiling %s" % header.short_path,
    )
    return compiled

precompiled_header = rule(
    implementation = _precompiled_header_impl,
    doc = "Makes NAME.h. Targets that depend on it include it by copts = [\"-include\", \"NAME.h\"].",
    attrs = {
        "copts": attr.string_list(doc = "The options of the sources that include it."),
        "deps": attr.label_list(providers = [CcInfo], doc = "Where the headers are."),
        "headers": attr.string_list(doc = "The headers that it includes, by the names in angle brackets."),
        "_cc_toolchain": attr.label(default = "@bazel_tools//tools/cpp:current_cc_toolchain"),
    },
    fragments = ["cpp"],
    toolchains = ["@bazel_tools//tools/cpp:toolchain_type"],
)
