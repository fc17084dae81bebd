"""The project's own gates: sizes, import contracts, pinned versions, the version, the make targets.

A gate that cannot fail is worth nothing, so each one is shown something wrong and must refuse it. The trees
they are shown are built here and do not depend on the state of the real one.
"""

import ast
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import grimp
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import paceline
from tools import check_sizes

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


# ---------------------------------------------------------------- sizes


def offences(text: str) -> list[tuple[str, str, int]]:
    found = check_sizes.measure_file(text, "file.py").offences
    return [(offence.place, offence.measure, offence.value) for offence in found]


def function_of(num_lines: int) -> str:
    """A function whose `def` and body together have `num_lines` lines."""
    return "def long():\n" + "    x = 1\n" * (num_lines - 1)


def test_function_lines_are_limited() -> None:
    assert offences(function_of(70)) == []
    assert offences(function_of(71)) == [("file.py::long", "lines", 71)]


def test_decorators_and_docstring_do_not_count_as_lines() -> None:
    docstring = '    """One.\n\n    Two.\n    """\n'
    header, body = function_of(70).split("\n", maxsplit=1)
    assert offences("@first\n@second(\n    1,\n)\n" + header + "\n" + docstring + body) == []


def test_comments_and_blank_lines_count_as_lines() -> None:
    assert offences(function_of(70) + "\n    # why\n    x = 2\n") == [("file.py::long", "lines", 73)]


def test_file_lines_are_limited() -> None:
    assert offences("x = 1\n" * 600) == []
    assert offences("x = 1\n" * 601) == [("file.py", "lines", 601)]


@pytest.mark.parametrize(
    ("header", "count"),
    [
        ("def f(a, b, c, d, e, f, g, h): ...", None),
        ("def f(a, b, c, d, e, f, g, h, i): ...", 9),
        ("async def f(a, /, b, c, d, e, f, g, *args, h, **kwargs): ...", 10),
        ("def f(self, a, b, c, d, e, f, g, h): ...", 9),
    ],
)
def test_parameters_are_limited(header: str, count: int | None) -> None:
    assert offences(header) == ([] if count is None else [("file.py::f", "parameters", count)])


@pytest.mark.parametrize("decorator", ["@triton.jit", '@triton.jit(do_not_specialize=["n"])'])
def test_a_kernel_may_be_longer_and_takes_every_pointer(decorator: str) -> None:
    kernel = function_of(120).replace("long()", "long(a, b, c, d, e, f, g, h, i)")
    assert offences(f"{decorator}\n{kernel}") == []
    assert offences(f"{decorator}\n{kernel}    x = 2\n") == [("file.py::long", "lines", 121)]
    assert {measure for _, measure, _ in offences(f"@numba.jitted\n{kernel}")} == {"lines", "parameters"}


@pytest.mark.parametrize("receiver", ["self", "cls"])
def test_the_receiver_of_a_method_is_no_parameter(receiver: str) -> None:
    method = f"class C:\n    def f({receiver}, a, b, c, d, e, f, g, h): ...\n"
    assert offences(method) == []
    assert offences(method.replace(" h)", " h, i)")) == [("file.py::C.f", "parameters", 9)]


def nested(openers: list[str], tail: str = "pass") -> str:
    lines = ["def f():"]
    lines += ["    " * (level + 1) + opener for level, opener in enumerate(openers)]
    return "\n".join(lines) + "\n" + "    " * (len(openers) + 1) + tail + "\n"


def test_nesting_is_limited() -> None:
    openers = ["for a in b:", "while a:", "with a:", "if a:"]
    assert offences(nested(openers)) == []
    assert offences(nested([*openers, "for a in b:"])) == [("file.py::f", "nesting", 5)]


def test_elif_is_one_level_and_else_if_is_two() -> None:
    chain = "def f():\n    if a:\n        pass\n" + "".join(
        f"    elif a == {i}:\n        pass\n" for i in range(9)
    )
    assert offences(chain) == []
    inside_else = "if a:\n    pass\nelse:\n    if b:\n        pass\n"
    assert check_sizes.depth(ast.parse(inside_else).body) == 2
    assert check_sizes.depth(ast.parse(inside_else.replace("else:\n    if b:\n    ", "elif b:\n")).body) == 1


def test_every_arm_of_a_block_is_looked_at() -> None:
    deep = "for a in b:\n{0}    for a in b:\n{0}        for a in b:\n{0}            for a in b: pass\n"
    handler = "def f():\n    try:\n        pass\n    except E:\n        " + deep.format(" " * 8)
    finale = "def f():\n    try:\n        pass\n    finally:\n        " + deep.format(" " * 8)
    otherwise = "def f():\n    for a in b:\n        pass\n    else:\n        " + deep.format(" " * 8)
    case = "def f():\n    match a:\n        case 1:\n            " + deep.format(" " * 12)
    for text in (handler, finale, otherwise, case):
        assert offences(text) == [("file.py::f", "nesting", 5)]


def test_an_inner_function_is_measured_on_its_own() -> None:
    outer = nested(["if a:", "if a:", "if a:", "if a:"], "def g():\n" + " " * 24 + "if a: pass")
    assert offences(outer) == []
    assert offences(
        "class A:\n    class B:\n        " + nested(["if a:"] * 5).replace("\n", "\n        ")
    ) == [("file.py::A.B.f", "nesting", 5)]


def test_main_reports_offenders_and_a_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "good.py").write_text("def short():\n    return 1\n", encoding="utf-8")
    assert check_sizes.main([str(tmp_path)]) == 0
    assert "1 functions in 1 files, median 2 lines" in capsys.readouterr().out
    (tmp_path / "long.py").write_text(function_of(90), encoding="utf-8")
    (tmp_path / "broken.py").write_text("def (:\n", encoding="utf-8")
    assert check_sizes.main([str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    assert "long.py:1: long has 90 lines (limit 70)" in printed
    assert "broken.py: cannot be read as Python" in printed
    assert printed.splitlines()[-1].endswith("2 problems")
    assert check_sizes.main([str(tmp_path / "absent")]) == 2


def test_an_exception_lets_one_measure_through(tmp_path: Path) -> None:
    path = tmp_path / "long.py"
    path.write_text(function_of(90), encoding="utf-8")
    assert check_sizes.main([str(path)], {(f"{path}::long", "lines"): "a table"}) == 0
    assert check_sizes.main([str(path)], {(f"{path}::long", "nesting"): "a table"}) == 1


def test_a_stale_exception_is_an_offence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "src").mkdir()
    monkeypatch.setattr(check_sizes, "ROOT", tmp_path)
    assert check_sizes.main([], {}) == 0
    assert check_sizes.main([], {("src/gone.py", "lines"): "was long once"}) == 1
    assert "stale entry in EXCEPTIONS" in capsys.readouterr().out


def test_no_comment_pushes_a_value_into_brackets() -> None:
    """The formatter breaks a line that its comment makes too long; the comment belongs above it."""
    pattern = re.compile(r"^ *[])}]+( = [^#\n]*)?,?  # (?!noqa|type:|fmt:)", re.MULTILINE)
    assert pattern.search("LIST = [\n    1\n]  # one\n")
    files = [path for part in ("src", "tests", "tools", "benchmarks") for path in (ROOT / part).rglob("*.py")]
    assert [path for path in files if pattern.search(path.read_text(encoding="utf-8"))] == []


# ---------------------------------------------------------------- import contracts


def layer_names() -> list[str]:
    (contract,) = (c for c in PYPROJECT["tool"]["importlinter"]["contracts"] if c["type"] == "layers")
    return [name for layer in contract["layers"] for name in re.findall(r"\w+", layer)]


@pytest.fixture
def skeleton(tmp_path: Path) -> Path:
    """An empty package with one folder for each layer."""
    package = tmp_path / "paceline"
    for name in layer_names():
        (package / name).mkdir(parents=True)
        (package / name / "__init__.py").touch()
    runner = ("cpu", "sampling", "kernels", "native", "native/code", "native/model", "native/step")
    parts = ("models/files", "models/media", "models/spec", "lab/sim", "lab/report", "lab/workload")
    for name in (*parts, *(f"runner/{part}" for part in runner)):
        (package / name).mkdir()
        (package / name / "__init__.py").touch()
    (package / "__init__.py").touch()
    return package


def lint_imports(package: Path) -> subprocess.CompletedProcess[str]:
    # The working folder comes first on the path of the linter, before the installed package.
    code = "import sys; from importlinter.cli import lint_imports_command as lint; lint(sys.argv[1:])"
    command = [
        sys.executable,
        "-c",
        code,
        "--config",
        str(ROOT / "pyproject.toml"),
        "--no-cache",
        "--no-logo",
    ]
    return subprocess.run(command, cwd=package.parent, capture_output=True, text=True, check=False)


def test_the_contracts_accept_every_layer_importing_all_lower_ones(skeleton: Path) -> None:
    (skeleton / "engine" / "uses.py").write_text(
        "import numpy\nfrom paceline import __version__, core, costs, errors, kv, scheduler\n",
        encoding="utf-8",
    )
    (skeleton / "costs" / "uses.py").write_text("import json\n", encoding="utf-8")
    (skeleton / "engine" / "also.py").write_text("import paceline.costs.uses\n", encoding="utf-8")
    (skeleton / "runner" / "uses.py").write_text("import torch\n", encoding="utf-8")
    (skeleton / "factory" / "uses.py").write_text("import paceline.runner.uses\n", encoding="utf-8")
    (skeleton / "lab" / "sim" / "uses.py").write_text("import paceline.factory.uses\n", encoding="utf-8")
    result = lint_imports(skeleton)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "0 broken" in result.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("kv/wrong.py", "import paceline.scheduler"),
        ("core/wrong.py", "def f() -> None:\n    from paceline.engine import x"),
        ("costs/wrong.py", "from paceline import lab"),
        ("engine/wrong.py", "import paceline.runner"),
        ("errors/wrong.py", "import paceline.config"),
        ("newcomer.py", ""),
        ("scheduler/wrong.py", "import torch.nn"),
        ("audit/wrong.py", "from transformers import AutoTokenizer"),
        ("lab/sim/wrong.py", "import triton"),
        ("kv/wrong.py", "from json import dumps"),
        ("runner/native/step/wrong.py", "import torch"),
        ("runner/cpu/wrong.py", "import numba"),
    ],
)
def test_the_contracts_refuse(skeleton: Path, module: str, text: str) -> None:
    (skeleton / module).write_text(text + "\n", encoding="utf-8")
    result = lint_imports(skeleton)
    assert result.returncode == 1, result.stdout + result.stderr
    assert "1 broken" in result.stdout


def test_the_engine_may_not_reach_torch_through_kernels(skeleton: Path) -> None:
    (skeleton / "runner" / "kernels" / "op.py").write_text("import torch\n", encoding="utf-8")
    (skeleton / "engine" / "wrong.py").write_text("import paceline.runner.kernels.op\n", encoding="utf-8")
    assert lint_imports(skeleton).returncode == 1


def circles(package: str) -> list[set[str]]:
    """Groups of modules that import each other, directly or through others, be it for types only."""
    graph = grimp.build_graph(package, cache_dir=None)
    reaches = {name: graph.find_upstream_modules(name) for name in sorted(graph.modules)}
    groups = [{name, *(each for each in reaches[name] if name in reaches[each])} for name in reaches]
    return [group for group in groups if len(group) > 1]


def test_no_module_is_part_of_a_circle() -> None:
    assert circles("paceline") == []


def test_a_circle_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "round").mkdir()
    (tmp_path / "round" / "__init__.py").touch()
    for name, other in (("one", "two"), ("two", "three"), ("three", "one")):
        (tmp_path / "round" / f"{name}.py").write_text(f"import round.{other}\n", encoding="utf-8")
    assert {"round.one", "round.two", "round.three"} in circles("round")


# ---------------------------------------------------------------- pinned versions


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    found = [line.partition("==") for line in lines if line and not line.startswith("#")]
    assert all(equals and version for _, equals, version in found)
    names = [name for name, _, _ in found]
    assert names == sorted(set(names))
    assert names == [canonicalize_name(name) for name in names]
    return {name: version for name, _, version in found}


def test_everything_installed_for_development_is_pinned() -> None:
    pinned = pins()
    seen: set[tuple[str, str]] = set()
    waiting = [Requirement("paceline[dev]")]
    while waiting:
        requirement = waiting.pop()
        for extra in {"", *requirement.extras} - {extra for name, extra in seen if name == requirement.name}:
            seen.add((requirement.name, extra))
            inner = map(Requirement, importlib.metadata.requires(requirement.name) or [])
            waiting += [
                need for need in inner if need.marker is None or need.marker.evaluate({"extra": extra})
            ]
    # The build backend is installed apart, for the build alone.
    backend = {Requirement(line).name for line in PYPROJECT["build-system"]["requires"]}
    names = {canonicalize_name(name) for name in {name for name, _ in seen} | backend} - {"paceline"}
    assert sorted(names - pinned.keys()) == []
    assert len(names) > 20


def test_pins_satisfy_the_declared_ranges() -> None:
    project = PYPROJECT["project"]
    extras = [line for lines in project["optional-dependencies"].values() for line in lines]
    for requirement in map(Requirement, [*project["dependencies"], *extras]):
        if requirement.name != "paceline":
            assert requirement.specifier.contains(pins()[canonicalize_name(requirement.name)]), requirement


# ---------------------------------------------------------------- version, make targets


def test_the_version_is_declared_once() -> None:
    assert PYPROJECT["project"]["dynamic"] == ["version"]
    assert "version" not in PYPROJECT["project"]
    assert importlib.metadata.version("paceline") == paceline.__version__


def run(*command: str) -> subprocess.CompletedProcess[str]:
    # These tests may themselves run under make, whose flags and level must not leak into the inner one.
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))
    }
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=120
    )


def test_make_help_lists_the_targets() -> None:
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    result = run("make", "--no-print-directory", "help")
    listed = [line.split()[0] for line in result.stdout.splitlines()]
    assert listed == [
        "help",
        "serve",
        "check",
        "test",
        "campaign",
        "again",
        "kernels",
        "chat",
        "demo",
        "sim",
        "options",
        "docs",
        "soak",
        "clean",
    ]
    assert run("make").stdout == result.stdout


def test_make_serve_runs_the_server() -> None:
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    result = run("make", "--dry-run", "--no-print-directory", "serve", "ARGS=--port 9000")
    assert result.returncode == 0, result.stderr
    assert "paceline serve --port 9000" in result.stdout


def test_every_test_belongs_to_a_gate() -> None:
    """Every test is in `make test` or `make campaign`, property tests in both; continuous integration runs both."""
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    commands = {
        target: run("make", "--dry-run", "--no-print-directory", target).stdout
        for target in ("test", "campaign")
    }
    assert 'pytest -q tests -m "not campaign" ' in commands["test"]
    assert 'pytest -q tests -m "campaign or hypothesis" ' in commands["campaign"]
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    assert {"make test", "make campaign"} <= set(script)


@pytest.mark.slow
def test_tests_of_a_file_run_on_one_worker(tmp_path: Path) -> None:
    """Or each worker starts the servers of the file again."""
    folder = tmp_path / "tests" / "e2e"
    folder.mkdir(parents=True)
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path / "tests")
    for name in "abc":
        (folder / f"test_{name}.py").write_text(
            "import os\nfrom pathlib import Path\nimport pytest\n"
            "@pytest.mark.parametrize('number', range(6))\ndef test_it(number):\n"
            f"    Path('{tmp_path}/{name}-' + os.environ['PYTEST_XDIST_WORKER']).touch()\n"
        )
    spread = re.findall(r"--dist \S+", (ROOT / "Makefile").read_text(encoding="utf-8"))[0].split()
    done = run(
        sys.executable, "-m", "pytest", "-q", "--rootdir", str(tmp_path), str(folder), "-n", "2", *spread
    )
    assert done.returncode == 0, done.stdout
    workers = [path.name.split("-") for path in tmp_path.glob("?-gw*")]
    assert sorted(name for name, _ in workers) == ["a", "b", "c"] and len({gw for _, gw in workers}) == 2


def test_serving_installs_no_development_tool() -> None:
    """`make serve` and `make chat` install the base package alone; what a developer uses is behind an extra."""
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    installs = {
        target: set(re.findall(r"-e '(\.[^']*)'", run("make", "-B", "--dry-run", target).stdout))
        for target in ("serve", "chat", "demo", "sim", "check")
    }
    assert installs == {
        "serve": {"."},
        "chat": {"."},
        "demo": {".[plot]"},
        "sim": {".[plot]"},
        "check": {".[dev]"},
    }


def installed_with(*names: str) -> set[str]:
    """The packages that come with these, by what is installed here."""
    found: set[str] = set()
    waiting = list(map(Requirement, names))
    while waiting:
        name = canonicalize_name(waiting.pop().name)
        if name not in found:
            found.add(name)
            needs = map(Requirement, importlib.metadata.requires(name) or [])
            waiting += [need for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})]
    return found


def test_serving_needs_at_most_40_packages_beside_torch() -> None:
    needed = installed_with(*PYPROJECT["project"]["dependencies"]) - installed_with("torch")
    assert 20 < len(needed) <= 40, sorted(needed)


def test_the_package_carries_its_readme() -> None:
    assert PYPROJECT["project"]["readme"] == "README.md"
    assert "pip install" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_python_dash_m_is_the_command() -> None:
    if not (ROOT / "src" / "paceline" / "cli" / "main.py").exists():
        pytest.skip("the command line is not there yet")
    result = run(sys.executable, "-m", "paceline", "--help")
    assert result.returncode == 0, result.stderr
    assert "sim" in result.stdout


# ---------------------------------------------------------------- mutants


@pytest.mark.parametrize("patch", sorted(ROOT.glob("tests/mutants/**/*.patch")), ids=lambda patch: patch.stem)
def test_every_mutant_applies(patch: Path) -> None:
    """The mutants themselves run late and take minutes; that the code moved away from one is known at once."""
    command = ["git", "apply", "-C1", "--check", str(patch)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
