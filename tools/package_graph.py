"""Draws the package as rooms: `python -m tools.package_graph [REVISION] --out FILE`.

One box per part of `paceline` (a folder or a module at the top), one cell per module, its area by lines, its colour by
the folder inside the part. Parts stand above what they import; a line is an import, a red one goes upwards.
"""

from __future__ import annotations

import argparse
import ast
import io
import math
import subprocess
import tarfile
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

ROOT = Path(__file__).resolve().parents[1]
COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756", "#72b7b2", "#9d755d", "#eeca3b", "#7f7f7f")
CELL = 0.013  # side of a cell by the square root of its lines
WIDTH = 15.0  # of a floor


@dataclass(slots=True)
class Part:
    """A folder or module right below the package."""

    name: str
    modules: list[tuple[str, int]] = field(default_factory=list)  # folder inside the part, lines
    imports: set[str] = field(default_factory=set)
    x: float = 0.0
    y: float = 0.0
    width: float = 0.0
    height: float = 0.0


def sources(revision: str) -> dict[str, str]:
    """Text by dotted name below the package, of a commit or of the working tree."""
    if not revision:
        root = ROOT / "src" / "paceline"
        return {
            _name(path.relative_to(root)): path.read_text(encoding="utf-8") for path in root.rglob("*.py")
        }
    packed = subprocess.run(
        ["git", "archive", revision, "src/paceline"], cwd=ROOT, capture_output=True, check=True
    ).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        members = [member for member in archive.getmembers() if member.name.endswith(".py")]
        texts = {member.name: archive.extractfile(member) for member in members}
        return {
            _name(Path(name).relative_to("src/paceline")): each.read().decode()
            for name, each in texts.items()
            if each is not None
        }


def _name(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def parts_of(texts: dict[str, str]) -> dict[str, Part]:
    found: dict[str, Part] = {}
    for name, text in texts.items():
        top, _, rest = name.partition(".")
        if top in ("", "__main__"):
            continue
        part = found.setdefault(top, Part(top))
        part.modules.append((rest.rpartition(".")[0], len(text.splitlines())))
        for node in ast.walk(ast.parse(text)):
            named = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if named == ["paceline"] and isinstance(node, ast.ImportFrom):
                named = [f"paceline.{each.name}" for each in node.names]
            part.imports |= {each.split(".")[1] for each in named if each.startswith("paceline.")}
    for part in found.values():
        part.imports &= found.keys() - {part.name}
    return found


def floors(parts: dict[str, Part]) -> list[list[Part]]:
    """Every part one floor above the highest part it imports."""
    level: dict[str, int] = {}

    def climb(name: str, above: tuple[str, ...]) -> int:
        if name not in level:
            below = [climb(each, (*above, name)) for each in parts[name].imports if each not in above]
            level[name] = 1 + max(below, default=-1)
        return level[name]

    rows: dict[int, list[Part]] = defaultdict(list)
    for name in sorted(parts):
        rows[climb(name, ())].append(parts[name])
    return [rows[number] for number in sorted(rows)]


def place(rows: list[list[Part]]) -> float:
    """Give every part its box; returns the height of the whole."""
    y = 0.0
    for row in rows:
        for part in row:
            area = sum((CELL**2 * lines * 1.75 + 0.006) for _, lines in part.modules)
            part.width = max(2.0, 1.25 * math.sqrt(area))
            part.height = max(0.45, area / part.width + 0.4)
        gap = (WIDTH - sum(part.width for part in row)) / (len(row) + 1)
        x = gap
        for part in row:
            part.x, part.y = x, y
            x += part.width + gap
        y += max(part.height for part in row) + 0.55
    return y


def draw(parts: dict[str, Part], title: str, path: Path) -> None:
    height = place(floors(parts))
    figure, axes = plt.subplots(figsize=(WIDTH, height + 0.8), dpi=80)
    axes.set_xlim(0, WIDTH)
    axes.set_ylim(-0.2, height + 0.4)
    axes.axis("off")
    axes.text(0.1, height + 0.1, title, fontsize=13)
    for part in parts.values():
        for name in part.imports:
            other = parts[name]
            goes_up = other.y >= part.y
            axes.plot(
                [part.x + part.width / 2, other.x + other.width / 2],
                [part.y, other.y + other.height],
                color="#d62728" if goes_up else "#bbbbbb",
                linewidth=1.2 if goes_up else 0.5,
                zorder=1,
            )
    for part in parts.values():
        _draw_part(axes, part)
    figure.savefig(path, bbox_inches="tight")
    plt.close(figure)


def _draw_part(axes: Axes, part: Part) -> None:
    box = Rectangle(
        (part.x, part.y), part.width, part.height, facecolor="white", edgecolor="#333333", zorder=2
    )
    axes.add_patch(box)
    lines = sum(count for _, count in part.modules)
    label = f"{part.name}  {len(part.modules)} files, {lines:,} lines"
    axes.text(part.x + 0.05, part.y + part.height - 0.17, label, fontsize=7, zorder=4)
    folders = sorted({folder for folder, _ in part.modules})
    x, y, tallest = part.x + 0.05, part.y + part.height - 0.24, 0.0
    for folder, count in sorted(part.modules):
        side = max(0.03, CELL * math.sqrt(count))
        if x + side > part.x + part.width - 0.03:
            x, y, tallest = part.x + 0.05, y - tallest - 0.02, 0.0
        colour = COLOURS[folders.index(folder) % len(COLOURS)]
        axes.add_patch(Rectangle((x, y - side), side, side, facecolor=colour, edgecolor="none", zorder=3))
        x, tallest = x + side + 0.02, max(tallest, side)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("revision", nargs="?", default="", help="a commit; default: the working tree")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    texts = sources(given.revision)
    parts = parts_of(texts)
    lines = sum(len(text.splitlines()) for text in texts.values())
    arrows = sum(len(part.imports) for part in parts.values())
    title = (
        f"{given.revision or 'now'}: {len(texts)} files, {lines:,} lines, {len(parts)} parts, {arrows} arrows"
    )
    draw(parts, title, given.out)
    print(title)


if __name__ == "__main__":
    main()
