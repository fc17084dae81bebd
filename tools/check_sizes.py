"""Checks the sizes that keep the code readable: lines of functions and files, parameters, nesting.

It reads source text only and imports nothing of the project, so that it works on a tree that does not run.
A limit is raised by a commit that says why; a single place is let through by an entry in `EXCEPTIONS`.

    python tools/check_sizes.py [FILE_OR_FOLDER ...]
"""

import ast
import statistics
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("src", "tests", "benchmarks", "tools")

FUNCTION_LINES = 70
FUNCTION_LINES_AIM = 40
FILE_LINES = 600
PARAMETERS = 8
NESTING = 4
# A kernel cannot be cut into functions that return early or hold state, and takes each address and stride.
KERNEL_LINES = 120

# (place, measure) -> reason. A place is "path/file.py" or "path/file.py::Class.method" and a measure is
# "lines", "parameters" or "nesting". An entry that lets nothing through is itself an offence.
EXCEPTIONS: dict[tuple[str, str], str] = {
    ("src/paceline/config/options.py::option", "parameters"): "a keyword for each fact about an option",
    ("src/paceline/factory.py::build_engine", "parameters"): "a keyword for each part a caller may replace",
    (
        "src/paceline/engine/engine.py::Engine.add",
        "parameters",
    ): "a keyword for each thing a prompt may come with",
    (
        "src/paceline/process/async_engine.py::AsyncEngine.submit",
        "parameters",
    ): "those of the interface, and how far another engine was with it",
    (
        "src/paceline/runner/gpu/runner.py::GPURunner.__init__",
        "parameters",
    ): "a keyword for each part that a runner may have",
    ("src/paceline/llm/llm.py::LLM.chat", "parameters"): "the keywords that programs written for vLLM give",
    ("src/paceline/llm/async_llm.py::AsyncLLM.tree", "parameters"): "what a tree may have, and whose it is",
    (
        "src/paceline/llm/async_llm.py::AsyncLLM.chat",
        "parameters",
    ): "the keywords that programs written for vLLM give",
}

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
BLOCKS = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith, ast.Try, ast.TryStar, ast.Match)


@dataclass(frozen=True, slots=True, kw_only=True)
class Offence:
    place: str
    line: int
    measure: str
    value: int
    limit: int

    def __str__(self) -> str:
        path, _, name = self.place.partition("::")
        what = {"lines": "lines", "parameters": "parameters", "nesting": "levels of nesting"}[self.measure]
        return f"{path}:{self.line}: {name or 'the file'} has {self.value} {what} (limit {self.limit})"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSizes:
    offences: tuple[Offence, ...]
    function_lines: tuple[int, ...]


def main(arguments: Sequence[str], exceptions: Mapping[tuple[str, str], str] = EXCEPTIONS) -> int:
    """Prints offences and a summary; returns the exit status."""
    # With explicit paths only a part is looked at, and an exception elsewhere is not stale for that.
    paths = [Path(argument) for argument in arguments]
    missing = [path for path in paths if not path.exists()]
    if missing:
        print(f"sizes: no such file or folder: {missing[0]}", file=sys.stderr)
        return 2
    offences: list[Offence] = []
    function_lines: list[int] = []
    problems: list[str] = []
    num_files = 0
    for path in python_files(paths or [ROOT / folder for folder in FOLDERS]):
        num_files += 1
        try:
            sizes = measure_file(path.read_text(encoding="utf-8"), shown_path(path))
        except (SyntaxError, UnicodeDecodeError) as error:
            problems.append(f"{shown_path(path)}: cannot be read as Python: {error}")
            continue
        offences += sizes.offences
        function_lines += sizes.function_lines
    used = {(offence.place, offence.measure) for offence in offences}
    problems += [str(offence) for offence in offences if (offence.place, offence.measure) not in exceptions]
    if not paths:
        problems += [f"stale entry in EXCEPTIONS: {entry}" for entry in exceptions if entry not in used]
    for problem in problems:
        print(problem)
    print(summary(num_files, function_lines, len(problems)))
    return 1 if problems else 0


def python_files(paths: Iterable[Path]) -> Iterator[Path]:
    for path in paths:
        yield from sorted(path.rglob("*.py")) if path.is_dir() else [path] if path.exists() else []


def measure_file(text: str, shown: str) -> FileSizes:
    """Sizes of one file; raises SyntaxError where it does not parse."""
    offences = []
    num_lines = len(text.splitlines())
    if num_lines > FILE_LINES:
        offences.append(Offence(place=shown, line=1, measure="lines", value=num_lines, limit=FILE_LINES))
    function_lines = []
    for name, function, is_method in functions(ast.parse(text, filename=shown)):
        lines = count_lines(function)
        function_lines.append(lines)
        kernel = is_kernel(function)
        most_lines = KERNEL_LINES if kernel else FUNCTION_LINES
        measured = [("lines", lines, most_lines), ("nesting", depth(function.body), NESTING)]
        if not kernel:
            measured.append(("parameters", count_parameters(function, is_method=is_method), PARAMETERS))
        offences += [
            Offence(place=f"{shown}::{name}", line=function.lineno, measure=measure, value=value, limit=limit)
            for measure, value, limit in measured
            if value > limit
        ]
    return FileSizes(offences=tuple(offences), function_lines=tuple(function_lines))


def functions(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, FunctionNode, bool]]:
    """Every function below `node`, with its qualified name and whether it is defined in a class body."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, FunctionNode):
            yield prefix + child.name, child, isinstance(node, ast.ClassDef)
        inner = f"{prefix}{child.name}." if isinstance(child, FunctionNode | ast.ClassDef) else prefix
        yield from functions(child, inner)


def count_lines(function: FunctionNode) -> int:
    """Lines from `def` to the end, without decorators and docstring."""
    assert function.end_lineno is not None
    lines = function.end_lineno - function.lineno + 1
    if ast.get_docstring(function, clean=False) is not None:
        docstring = function.body[0]
        assert docstring.end_lineno is not None
        lines -= docstring.end_lineno - docstring.lineno + 1
    return lines


def count_parameters(function: FunctionNode, *, is_method: bool) -> int:
    arguments = function.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    starred = (arguments.vararg is not None) + (arguments.kwarg is not None)
    receiver = is_method and bool(named) and named[0].arg in ("self", "cls")
    return len(named) + starred - receiver


def is_kernel(function: FunctionNode) -> bool:
    """Whether Triton (`@triton.jit`, `@triton.jit(...)`) or numba (`@kernel`, `@apart`, runner/native) compiles it."""
    names = [
        decorator.func if isinstance(decorator, ast.Call) else decorator
        for decorator in function.decorator_list
    ]
    return any(
        name.attr == "jit"
        if isinstance(name, ast.Attribute)
        else getattr(name, "id", "") in ("kernel", "apart")
        for name in names
    )


def depth(statements: Sequence[ast.stmt]) -> int:
    """Levels of control blocks; a function or class defined inside is measured on its own."""
    return max((statement_depth(statement) for statement in statements), default=0)


def statement_depth(statement: ast.stmt) -> int:
    if not isinstance(statement, BLOCKS):
        return 0
    if isinstance(statement, ast.If) and len(statement.orelse) == 1 and is_elif(statement):
        # `elif` is an `if` inside `else` to the parser, but the same level to a reader.
        return max(1 + depth(statement.body), statement_depth(statement.orelse[0]))
    inner: list[ast.stmt] = []
    for part in ast.iter_child_nodes(statement):
        if isinstance(part, ast.stmt):
            inner.append(part)
        elif isinstance(part, ast.ExceptHandler | ast.match_case):
            inner += part.body
    return 1 + depth(inner)


def is_elif(statement: ast.If) -> bool:
    """Whether the one statement in `else` is spelt `elif`: it then starts in the column of the `if`."""
    follower = statement.orelse[0]
    return isinstance(follower, ast.If) and follower.col_offset == statement.col_offset


def summary(num_files: int, function_lines: Sequence[int], num_problems: int) -> str:
    if not function_lines:
        return f"sizes: no functions in {num_files} files; {num_problems} problems"
    median = statistics.median(function_lines)
    above = sum(lines > FUNCTION_LINES_AIM for lines in function_lines)
    return (
        f"sizes: {len(function_lines)} functions in {num_files} files, median {median:g} lines, longest "
        f"{max(function_lines)}, {above} above the aim of {FUNCTION_LINES_AIM}; {num_problems} problems"
    )


def shown_path(path: Path) -> str:
    resolved = path.resolve()
    return str(resolved.relative_to(ROOT)) if resolved.is_relative_to(ROOT) else str(path)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
