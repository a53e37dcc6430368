"""Builds the API reference, one HTML page, from the docstrings of torch_ext's public names.

    python docs/build_reference.py out/reference

Note: arguments. A docstring has a line "name: what it is" for each argument, with what does not fit into it indented
below. As Markdown such lines would run together; here they become a list.
"""

import argparse
import inspect
import pathlib
import re
import sys
from collections.abc import Iterable, Iterator

import pdoc.doc
import pdoc.render

sys.path.insert(
    0, str(pathlib.Path(__file__).absolute().parents[1])
)  # the repository's root; not needed when installed
import torch_ext

# What users call of OptimizerBase, which is not public; its other methods are for the package.
_OF_BASES = {"add_param_group", "consolidate_state_dict", "load_state_dict", "state_dict"}

_NAMES = re.compile(r"(\w+(?:, \w+)*): (.*)")
_CHOICE = re.compile(r"    (\w+(?: \(\d\))?): (.*)")  # what an argument may be: an indented line of its own


def with_argument_list(docstring: str, arguments: Iterable[str]) -> str:
    """The docstring with a Markdown list in place of its lines "argument: text"."""
    names, lines, listed = set(arguments), [], False
    for line in docstring.splitlines():
        found = _NAMES.match(line)
        if found and names.issuperset(found[1].split(", ")):
            lines += ([] if listed else [""]) + [f"- **{found[1]}**: {found[2]}"]
            listed = True
            continue
        listed = listed and line.startswith("    ")
        choice = _CHOICE.match(line) if listed else None
        lines.append(f"    - `{choice[1]}`: {choice[2]}" if choice else line)
    return "\n".join(lines)


def documented(member: pdoc.doc.Doc) -> Iterator[pdoc.doc.Doc]:
    """A public member, and what a public class has."""
    yield member
    if isinstance(member, pdoc.doc.Class):
        yield from member.own_members


def take_over(shown: pdoc.doc.Class) -> None:
    """What a public class inherits from one that is not becomes its own, or that of its first public base."""
    public = [base for base in inspect.getmro(shown.obj) if getattr(torch_ext, base.__name__, None) is base]
    for name in _OF_BASES & shown.members.keys():
        member = shown.members[name]
        if member.taken_from[1].split(".")[0] not in torch_ext.__all__:
            member.taken_from = (public[-1].__module__, f"{public[-1].__name__}.{name}")


def arguments_of(member: pdoc.doc.Doc) -> list[str]:
    """A class has those of its constructor; exceptions, which are not made by users, have none."""
    is_exception = isinstance(member, pdoc.doc.Class) and issubclass(member.obj, BaseException)
    if isinstance(member, pdoc.doc.Class | pdoc.doc.Function) and not is_exception:
        return [name for name in inspect.signature(member.obj).parameters if name != "self"]
    return []


def reference() -> pdoc.doc.Module:
    """torch_ext as its `__all__` shows it."""
    for name in torch_ext.__all__:  # those that are imported at their first use, too
        setattr(torch_ext, name, getattr(torch_ext, name))
    module = pdoc.doc.Module(torch_ext)
    for member in module.members.values():
        if isinstance(member, pdoc.doc.Class):
            take_over(member)
        if isinstance(member, pdoc.doc.Class) and hasattr(member.obj.__init__, "__signature__"):
            made_by = member.get("__init__")  # pdoc looks behind the decorator that gives this signature
            vars(made_by)["signature"] = inspect.signature(member.obj)
        for each in documented(member):
            vars(each)["docstring"] = with_argument_list(each.docstring, arguments_of(each))
    return module


def where_shown(text: str) -> str:
    """The page with links to members that a class inherits turned to the class that has them, or to mere text where
    that is torch's: pdoc shows a member once, and links to it as each class's own."""
    anchors = set(re.findall(r'id="([^"]+)"', text))

    def turned(link: re.Match[str]) -> str:
        if link[1] in anchors:
            return link[0]
        owner, _, member = link[1].partition(".")
        bases = inspect.getmro(getattr(torch_ext, owner))
        found = [name for base in bases if (name := f"{base.__name__}.{member}") in anchors]
        return f'<a href="#{found[0]}">{link[2]}</a>' if found else link[2]

    return re.sub(r'<a href="#([^"]+)">(.*?)</a>', turned, text)


def html() -> str:
    pdoc.render.configure(docformat="markdown", show_source=False, search=False)
    module = reference()
    return where_shown(pdoc.render.html_module(module=module, all_modules={module.modulename: module}))


def main(arguments: list[str] | None = None) -> None:
    """`arguments`: those of the process where None."""
    parser = argparse.ArgumentParser(prog="python docs/build_reference.py", description="The API reference as HTML.")
    parser.add_argument("folder", type=pathlib.Path, help="where torch_ext.html is written")
    folder = parser.parse_args(arguments).folder
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "torch_ext.html").write_text(html())
    print(folder / "torch_ext.html")


if __name__ == "__main__":
    main()
