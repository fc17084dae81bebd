"""Moves and joins the modules of src/paceline by tools/layout.toml, and rewrites whatever names them.

    python -m tools.relayout && ruff check --fix --select I001,F401,UP037 . && ruff format .

Imports, dotted names in strings, paths in documents and in the patches of mutants follow. Joined modules keep their
text: the parts stand in the order of their imports, each below a comment with the first sentence of its docstring. What
a program cannot decide (two definitions of one name, an import that means something else) is printed and left.
"""

from __future__ import annotations

import ast
import io
import itertools
import re
import sys
import textwrap
import tokenize
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "paceline"
FOLDERS = ("tests", "benchmarks", "tools", "examples", "docs", "deploy", ".ci")
FILES = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")
SETTINGS = ("pyproject.toml", "Makefile", "mkdocs.yml")
NO_TEXT = frozenset((".png", ".svg", ".gz", ".json", ".pyc"))
OWN = frozenset(("tools/relayout.py", "tools/layout.toml"))
# Module names that say nothing without their folder: imported as `folder_name`.
GENERIC = frozenset(("compare", "engine", "fetch", "flags", "page", "requests", "run", "session", "view"))
DOTTED = re.compile(r"(?<![\w.])paceline(?:\.\w+)+")
MARK = "paceline@"  # a new name, not to be rewritten again


def full(name: str) -> str:
    return f"paceline.{name}"


class Part:
    """One module taken apart: docstring, imports, the rest, and the names it defines and imports."""

    def __init__(self, text: str) -> None:
        self.tree = ast.parse(text)
        self.doc = ast.get_docstring(self.tree, clean=False)
        self.imports: list[str] = []
        self.typing: list[str] = []
        self.needs: set[str] = set()  # modules needed when it is imported
        lines, dropped = text.splitlines(), set[int]()
        for node in self.tree.body[0 if self.doc is None else 1 :]:
            own = range(node.lineno, (node.end_lineno or node.lineno) + 1)
            if isinstance(node, ast.Import | ast.ImportFrom):
                if not (isinstance(node, ast.ImportFrom) and node.module == "__future__"):
                    self.imports.append("\n".join(lines[own[0] - 1 : own[-1]]))
                dropped.update(own)
            elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
                self.typing.append("\n".join(lines[own[0] : own[-1]]))
                dropped.update(own)
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                self.needs |= {node.module, *(f"{node.module}.{each.name}" for each in node.names)}
        if self.doc is not None:
            dropped.update(range(1, (self.tree.body[0].end_lineno or 1) + 1))
        self.body = "\n".join(line for number, line in enumerate(lines, 1) if number not in dropped).strip(
            "\n"
        )
        self.defined = {name: node for node in self.tree.body for name in names_of(node)}
        self.imported = {
            each.asname or each.name: f"{node.module}.{each.name}"
            for node in ast.walk(self.tree)
            if isinstance(node, ast.ImportFrom)
            for each in node.names
        }


def names_of(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Assign):
        return [name.id for target in node.targets for name in ast.walk(target) if isinstance(name, ast.Name)]
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return [node.target.id]
    return []


def first_line(node: ast.stmt) -> int:
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    return min([node.lineno, *(each.lineno for each in decorators)])


def renamed(text: str, names: Mapping[str, str]) -> str:
    """The text with identifiers renamed, attributes left alone."""
    found = list(tokenize.generate_tokens(io.StringIO(text).readline))
    lines = text.splitlines(keepends=True)
    for before, token in reversed(list(itertools.pairwise(found))):
        if token.type == tokenize.NAME and token.string in names and before.string != ".":
            (row, start), end = token.start, token.end[1]
            lines[row - 1] = lines[row - 1][:start] + names[token.string] + lines[row - 1][end:]
    return "".join(lines)


class Relayout:
    """The whole move; `run` does it once, on a clean tree."""

    def __init__(self, layout: Mapping[str, Any]) -> None:
        self.layout = layout
        self.files = {self._module(path): path for path in sorted(PACKAGE.rglob("*.py"))}
        self.texts = {name: path.read_text(encoding="utf-8") for name, path in self.files.items()}
        self.new: dict[str, str] = {}  # by old name
        self.sources: dict[str, list[str]] = {}  # by new name
        self.moved: dict[tuple[str, str], str] = {}  # module of a name that left its own
        self.renames: dict[str, dict[str, str]] = {}
        self.problems: list[str] = []

    def run(self) -> list[str]:
        self._edit("before")
        self._split()
        self._place()
        self.packages = {name.rsplit(".", depth)[0] for name in self.sources for depth in range(1, 5)}
        self._paths = self._path_pattern()
        joined = {
            name: self._joined(name, olds) if len(olds) > 1 else self.texts[olds[0]]
            for name, olds in self.sources.items()
        }
        self._write({name: self._python(text, name) for name, text in joined.items()})
        self._rewrite_rest()
        self._edit("after")
        return self.problems

    # -- where everything goes -----------------------------------------------------------------------------

    def _module(self, path: Path) -> str:
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    def _place(self) -> None:
        for name, olds in self.layout["modules"].items():
            there = [full(old) for old in olds if full(old) in self.texts]
            self.problems += [f"{old} is missing" for old in olds if full(old) not in self.texts]
            if there:
                self.sources[full(name)] = there
                self.new |= dict.fromkeys(there, full(name))
        for name in [name for name in self.texts if name not in self.new]:
            self.new[name] = self._by_prefix(name)
            self.sources.setdefault(self.new[name], [name])
        for split in self.layout["split"]:
            for name in split["names"]:
                self.moved[full(split["from"]), name] = self.new[full(split["to"])]

    def _by_prefix(self, name: str) -> str:
        for old, new in self.layout["prefixes"].items():
            if name == full(old) or name.startswith(full(old) + "."):
                return full(new) + name[len(full(old)) :]
        return name

    def _path(self, name: str) -> Path:
        path = PACKAGE.parent.joinpath(*name.split("."))
        kept = [self.files[old].name for old in self.sources[name] if old in self.files]
        is_package = name in self.packages or set(kept) == {"__init__.py"}
        return path / "__init__.py" if is_package else path.with_suffix(".py")

    def _path_pattern(self) -> re.Pattern[str]:
        self._new_paths: dict[str, str] = {}
        for name, path in self.files.items():
            old, new = path.relative_to(PACKAGE), self._path(self.new[name]).relative_to(PACKAGE)
            if old != new and len(old.parts) > 1 and old.name != "__init__.py":
                self._new_paths[str(old)] = str(new)
        for old_folder, new_folder in self.layout["folders"].items():
            for path in (PACKAGE / old_folder).rglob("*.*"):
                inside = path.relative_to(PACKAGE / old_folder)
                self._new_paths[f"{old_folder}/{inside}"] = f"{new_folder}/{inside}"
        longest = "|".join(map(re.escape, sorted(self._new_paths, key=len, reverse=True)))
        start = r"((?<![\w/.-])(?:(?:\.\./)*src/paceline/|paceline/)?|(?<=[ab]/)src/paceline/)"
        return re.compile(rf"{start}({longest})\b")

    # -- taking apart and joining --------------------------------------------------------------------------

    def _split(self) -> None:
        """Definitions that leave their module become a module that is placed like any other."""
        for split in self.layout["split"]:
            old, new, names = full(split["from"]), full(split["to"]), set(split["names"])
            part, lines = Part(self.texts[old]), self.texts[old].splitlines()
            taken, bodies = set[int](), []
            for node in part.tree.body:
                if names.isdisjoint(names_of(node)):
                    continue
                start, end = first_line(node), node.end_lineno or node.lineno
                while lines[start - 2].startswith("#"):
                    start -= 1
                bodies.append("\n".join(lines[start - 1 : end]))
                taken.update(range(start, end + 1))
            rest = "\n".join(line for number, line in enumerate(lines, 1) if number not in taken) + "\n"
            back = sorted((set(part.defined) - names) & used_names("\n".join(bodies)))
            head = [f'"""{split["docstring"]}"""'] if split["docstring"] else []
            head += ["from __future__ import annotations", *part.imports]
            head += [f"from {old} import {', '.join(back)}"] if back else []
            self.texts[new] = "\n".join(head) + "\n\n\n" + "\n\n\n".join(bodies) + "\n"
            needed = sorted(names & used_names(rest))
            future = "from __future__ import annotations\n"
            if needed:
                rest = rest.replace(future, f"{future}from {new} import {', '.join(needed)}\n", 1)
            self.texts[old] = rest

    def _joined(self, name: str, olds: list[str]) -> str:
        self._settle_names(name, olds)
        parts = {old: Part(self.texts[old]) for old in olds}
        order = in_order(parts)
        head = [] if parts[olds[0]].doc is None else [f'"""{parts[olds[0]].doc}"""\n']
        head += ["from __future__ import annotations\n"]
        head += dict.fromkeys(text for old in order for text in parts[old].imports)
        typing = list(dict.fromkeys(text for old in order for text in parts[old].typing))
        head += ["\nif TYPE_CHECKING:", *typing] if typing else []
        seen = set[str]()
        for old in order:
            doc = parts[old].doc
            if old != olds[0] and doc is not None:
                sentence = re.split(r"(?<=[.:])\s", " ".join(doc.split()))[0].rstrip(":")
                head.append("\n\n# " + "\n# ".join(textwrap.wrap(sentence, 106)) + "\n")
            head.append("\n\n" + without(parts[old].body, seen) + "\n")
            seen |= set(parts[old].defined)
        return "\n".join(head)

    def _settle_names(self, name: str, olds: list[str]) -> None:
        owner: dict[str, str] = {}
        for old in olds:
            part = Part(self.texts[old])
            for each, node in part.defined.items():
                first = owner.setdefault(each, old)
                if first == old or ast.unparse(Part(self.texts[first]).defined[each]) == ast.unparse(node):
                    continue
                wanted = self.layout["renames"].get(f"{old.removeprefix('paceline.')}:{each}")
                if wanted is None:
                    self.problems.append(f"{name}: {each} is defined by {first} and by {old}")
                else:
                    self.renames.setdefault(old, {})[each] = wanted
            self.texts[old] = renamed(self.texts[old], self.renames.get(old, {}))
        imported: dict[str, str] = {}
        for old in olds:
            for each, target in Part(self.texts[old]).imported.items():
                inside = any(target == f"{other}.{each}" for other in olds)
                if not inside and (imported.setdefault(each, target) != target or each in owner):
                    self.problems.append(f"{name}: {each} means more than one thing")

    # -- references ----------------------------------------------------------------------------------------

    def _python(self, text: str, here: str | None) -> str:
        try:
            tree = ast.parse(text)
        except SyntaxError:
            return self._text(text)
        lines = text.splitlines(keepends=True)
        uses: dict[str, str] = {}
        own: set[str] = set()
        for node in sorted(imports_of_ours(tree), key=lambda each: each.lineno, reverse=True):
            groups, changed = self._groups(node, here, uses, own)
            if changed:
                indent = lines[node.lineno - 1][: node.col_offset]
                rest = lines[(node.end_lineno or 1) - 1][node.end_col_offset or 0 :].rstrip("\n")
                made = [f"{indent}from {where} import {', '.join(names)}" for where, names in groups.items()]
                ending = f"{rest}\n" if made and rest.strip().startswith("#") else "\n" if made else ""
                lines[node.lineno - 1 : node.end_lineno] = ["\n".join(made) + ending]
        text = renamed("".join(lines), {old: new for old, new in uses.items() if old != new})
        for name in own:
            text = re.sub(rf"(?<![\w.]){name}\.(?=\w)", "", text)
        return self._text(text).replace(MARK, "paceline").replace("if TYPE_CHECKING:\n    pass\n", "")

    def _groups(
        self, node: ast.ImportFrom, here: str | None, uses: dict[str, str], own: set[str]
    ) -> tuple[dict[str, list[str]], bool]:
        """The names of an import by the module they come from now; `own` are joined modules used by name."""
        groups: dict[str, list[str]] = {}
        changed = False
        module = node.module or ""
        for each in node.names:
            named = f" as {each.asname}" if each.asname else ""
            whole = f"{module}.{each.name}"
            where, name = self.new.get(module, module), each.name
            if whole in self.new:
                where, name = self.new[whole].rsplit(".", 1)
                if self.new[whole] == here:
                    own.add(each.asname or each.name)
                    changed = True
                    continue
                if not each.asname and name != each.name:
                    uses[each.name] = f"{where.rsplit('.', 1)[1]}_{name}" if name in GENERIC else name
                    named = f" as {uses[each.name]}" if name in GENERIC else ""
            elif module in self.new:
                where = self.moved.get((module, each.name), where)
                name = self.renames.get(module, {}).get(each.name, each.name)
                if name != each.name and not each.asname:
                    uses[each.name] = name
                if where == here:
                    changed = True
                    continue
            changed = changed or (where, name) != (module, each.name)
            groups.setdefault(MARK + where.removeprefix("paceline"), []).append(name + named)
        return groups, changed

    def _text(self, text: str) -> str:
        def new_name(found: re.Match[str]) -> str:
            parts = found[0].split(".")
            for count in range(len(parts), 1, -1):
                old = ".".join(parts[:count])
                if old in self.new:
                    return ".".join([self.new[old], *parts[count:]])
            return found[0]

        text = DOTTED.sub(new_name, text)
        return self._paths.sub(lambda found: found[1] + self._new_paths[found[2]], text)

    # -- files ---------------------------------------------------------------------------------------------

    def _write(self, texts: Mapping[str, str]) -> None:
        for path in self.files.values():
            path.unlink()
        for name, text in texts.items():
            path = self._path(name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        for old, new in self.layout["folders"].items():
            (PACKAGE / old).rename(PACKAGE / new)
        for folder in {path.parent for path in PACKAGE.rglob("*.py")}:
            if not (folder / "__init__.py").exists():
                doc = self.layout["packages"].get(str(folder.relative_to(PACKAGE)), "What is it?")
                (folder / "__init__.py").write_text(f'"""{doc}"""\n', encoding="utf-8")
        for folder in sorted((path for path in PACKAGE.rglob("*") if path.is_dir()), reverse=True):
            if not any(path.is_file() and path.suffix != ".pyc" for path in folder.rglob("*")):
                for path in sorted(folder.rglob("*"), reverse=True):
                    path.rmdir() if path.is_dir() else path.unlink()
                folder.rmdir()

    def _rewrite_rest(self) -> None:
        inside = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file())
        for path in [*inside, *(ROOT / name for name in (*FILES, *SETTINGS))]:
            if path.suffix in NO_TEXT or str(path.relative_to(ROOT)) in OWN:
                continue
            text = path.read_text(encoding="utf-8")
            new = self._python(text, None) if path.suffix == ".py" else self._text(text)
            if new != text:
                path.write_text(new, encoding="utf-8")

    def _edit(self, when: str) -> None:
        for edit in self.layout["edit"]:
            if edit["when"] != when:
                continue
            path = ROOT / edit["file"]
            text = path.read_text(encoding="utf-8")
            if edit["old"] not in text:
                self.problems.append(f"{edit['file']} has no {edit['old']!r}")
            text = text.replace(edit["old"], edit["new"])
            path.write_text(text, encoding="utf-8")
            name = self._module(path) if when == "before" else ""
            if name in self.texts:
                self.texts[name] = text


def used_names(text: str) -> set[str]:
    return {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}


def imports_of_ours(tree: ast.Module) -> Iterable[ast.ImportFrom]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "paceline":
            yield node


def in_order(parts: Mapping[str, Part]) -> list[str]:
    """Each part after those it needs when it is imported."""
    order: list[str] = []

    def visit(name: str) -> None:
        if name not in order:
            for other in parts:
                if other != name and other in parts[name].needs:
                    visit(other)
            order.append(name)

    for name in parts:
        visit(name)
    return order


def without(body: str, seen: set[str]) -> str:
    """The body without definitions that stand above it already, word for word."""
    dropped = {
        line
        for node in ast.parse(body).body
        if names_of(node) and set(names_of(node)) <= seen
        for line in range(first_line(node), (node.end_lineno or node.lineno) + 1)
    }
    return "\n".join(line for number, line in enumerate(body.splitlines(), 1) if number not in dropped)


if __name__ == "__main__":
    relayout = Relayout(tomllib.loads((ROOT / "tools" / "layout.toml").read_text(encoding="utf-8")))
    found = relayout.run()
    print("\n".join(found) or f"{len(relayout.sources)} modules")
    sys.exit(bool(found))
