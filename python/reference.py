"""Writes the reference of the package from its docstrings.

    python3 python/reference.py [--check]

The source is parsed, not imported: neither PyTorch nor a framework is needed. With --check
the page is compared and nothing is written; exit code 1: the page is stale.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import pathlib
import re
import sys

HERE = pathlib.Path(__file__).resolve().parent
PACKAGE = HERE / "src" / "ckptstore"
PAGE = HERE.parent / "docs" / "reference" / "python.md"
HEAD = """# Python API

The public names of `ckptstore`, from the docstrings of the package. This page is written by
`python3 python/reference.py`. [From DCP](../howto/pytorch.md) shows how they are used.
"""
MODULES = {
    "dcp": "PyTorch Distributed Checkpoint", "filesystem": "fsspec, for `ckptstore://` URLs", "hf": "Hugging Face Trainer",
    "lightning": "Lightning", "ray": "Ray Train and Ray Tune", "megatron": "Megatron Core", "deepspeed": "DeepSpeed",
}


class Source:
    """The parsed modules of the package."""

    def __init__(self, folder: pathlib.Path):
        self._folder = folder
        self._modules: dict[str, ast.Module] = {}

    def module(self, name: str) -> ast.Module:
        if name not in self._modules:
            path = self._folder / f"{name}.py"
            self._modules[name] = ast.parse((path if path.is_file() else self._folder / name / "__init__.py").read_text())
        return self._modules[name]

    def find(self, module: str, name: str) -> ast.FunctionDef | ast.ClassDef:
        for node in ast.walk(self.module(module)):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == name:
                return node
        raise SystemExit(f"{module} does not define {name}")

    def places(self) -> dict[str, str]:
        """Returns the module of each public name of the package."""
        places: dict[str, str] = {}
        for node in self.module("__init__").body:
            if isinstance(node, ast.ImportFrom) and node.module == "errors":
                places.update((alias.name, "errors") for alias in node.names)
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_LATER":
                places.update(ast.literal_eval(node.value))
        return places

    def exports(self, module: str) -> list[tuple[str, ast.FunctionDef | ast.ClassDef]]:
        """Returns the public functions and classes of a submodule."""
        tree = self.module(module)
        found: list[tuple[str, ast.FunctionDef | ast.ClassDef]] = []
        for node in tree.body:
            if isinstance(node, ast.ImportFrom) and node.level == 1 and node.module and (self._folder / module).is_dir():
                found += [(alias.name, self.find(f"{module}/{node.module}", alias.name)) for alias in node.names if not alias.name.startswith("_")]
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
                found.append((node.name, node))
        return found


def signature(node: ast.FunctionDef, method: bool) -> str:
    arguments = ast.parse(ast.unparse(node)).body[0]
    assert isinstance(arguments, ast.FunctionDef)
    if method and arguments.args.args and not any(ast.unparse(d) == "staticmethod" for d in node.decorator_list):
        arguments.args.args.pop(0)
    returns = f" -> {ast.unparse(node.returns)}" if node.returns and ast.unparse(node.returns) != "None" else ""
    return f"({ast.unparse(arguments.args)}){returns}"


def text(node: ast.FunctionDef | ast.ClassDef) -> str:
    """Returns the docstring as Markdown: roles as code, sections of Google style as lists."""
    doc = inspect.cleandoc(ast.get_docstring(node) or "")
    if not doc:
        return ""
    doc = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", doc).replace("``", "`")
    lines, section = [], False
    for line in doc.split("\n"):
        if re.fullmatch(r"(Args|Returns|Raises|Attributes|Yields|Example|Examples):", line):
            lines += ["", f"**{line[:-1]}**", ""]
            section = line not in ("Example:", "Examples:")
        elif section and re.match(r"    \S", line):
            name, colon, rest = line.strip().partition(": ")
            lines.append(f"- `{name}`: {rest}" if colon and re.fullmatch(r"[\w*., ]+", name) else f"- {line.strip()}" if not lines[-1].startswith("- ") else f"  {line.strip()}")
        elif section and line.startswith("     "):
            lines.append(f"  {line.strip()}")
        else:
            section = section and line.strip() == ""
            lines.append(line)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip() + "\n"


def render(name: str, node: ast.FunctionDef | ast.ClassDef) -> str:
    if isinstance(node, ast.FunctionDef):
        return f"\n### {name}\n\n```text\n{name}{signature(node, False)}\n```\n\n{text(node)}"
    bases = ", ".join(ast.unparse(base) for base in node.bases if not ast.unparse(base).startswith("_"))
    made = next((member for member in node.body if isinstance(member, ast.FunctionDef) and member.name == "__init__"), None)
    head = f"class {name}{signature(made, True) if made else f'({bases})' if bases else ''}"
    out = f"\n### {name}\n\n```text\n{head}\n```\n\n{text(node)}"
    for member in node.body:
        if not isinstance(member, ast.FunctionDef) or member.name.startswith("_") or not ast.get_docstring(member):
            continue
        decorators = [ast.unparse(decorator) for decorator in member.decorator_list]
        if any(decorator.endswith(".setter") for decorator in decorators):
            continue
        kind = "property" in decorators or "functools.cached_property" in decorators
        shown = f"{name}.{member.name}" + ("" if kind else signature(member, True))
        out += f"\n**`{shown}`**\n\n{text(member)}"
    return out


def page() -> str:
    source = Source(PACKAGE)
    places = source.places()
    functions = [(name, source.find(module, name)) for name, module in places.items()]
    out = HEAD
    for title, wanted in (
        ("Functions", [(name, node) for name, node in functions if isinstance(node, ast.FunctionDef)]),
        ("Classes", [(name, node) for name, node in functions if isinstance(node, ast.ClassDef) and places[name] != "errors"]),
        ("Errors", [(name, node) for name, node in functions if places[name] == "errors"]),
    ):
        out += f"\n## {title}\n" + "".join(render(name, node) for name, node in sorted(wanted))
    for module, title in MODULES.items():
        out += f"\n## ckptstore.{module}\n\n{title}.\n" + "".join(render(f"{module}.{name}", node) for name, node in source.exports(module))
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    written = page()
    if not parser.parse_args().check:
        PAGE.write_text(written)
        return 0
    if not PAGE.is_file() or PAGE.read_text() != written:
        print(f"{PAGE} is stale: run python3 python/reference.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
