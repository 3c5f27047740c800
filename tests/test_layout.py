"""The package's shape, checked: what may import what, what ships, how large a file may grow."""

import ast
import io
import tokenize
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HOME = {"readers": ROOT / "readers", "processors": ROOT / "processors"}
MAX_FILE_LINES = 500
MAX_CODE_LINES = 16_470  # of the package: without tests, blank lines, comments and docstrings
MAX_FRAME_LINES = 11_335  # the same without readers, processors and writers: formats add up

# Lower rows may not import higher ones; most rows' own members may not import one another.
LAYERS = [
    {
        "errors",
        "protocols",
        "records",
        "rng",
        "metrics",
        "tables",
        "arrayfile",
        "filecache",
        "remote",
        "stores",
        "mrope",
        "packed",
        "measured",
        "show",
    },
    {"readers", "processors", "runners", "shm", "io", "roworder", "media"},
    {"ops", "work", "batch", "samples", "checkpoint", "index", "writers"},
    {"engine"},
    {
        "options",
        "meshes",
        "stages",
        "compiled",
        "indexing",
        "builder",
        "planning",
        "resume",
        "report",
        "pipeline",
        "recipe",
    },
    {"integrations", "cli"},
]
LEVEL = {part: level for level, parts in enumerate(LAYERS) for part in sorted(parts)}
SIBLINGS_MAY_MEET = {0, 4, 5}
NOT_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    tokenize.ENDMARKER,
}


def modules() -> Iterator[tuple[str, Path]]:
    """Yield (part, file) for every source file outside `zephon_mm/__init__.py`."""
    for part in LEVEL:
        home = HOME.get(part, ROOT / "zephon_mm" / part)
        if home.is_dir():
            yield from ((part, path) for path in sorted(home.rglob("*.py")))
        elif (file := home.with_suffix(".py")).is_file():
            yield part, file


def parts_imported(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, part) for each import of the package, also inside functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            package, _, rest = name.partition(".")
            assert package not in HOME, f"{path}:{node.lineno} write zephon_mm.{name}"
            if package == "zephon_mm" and rest:
                yield node.lineno, rest.partition(".")[0]


SOURCES = [pytest.param(part, path, id=str(path.relative_to(ROOT))) for part, path in modules()]


@pytest.mark.parametrize(("part", "path"), SOURCES)
def test_imports_point_down(part: str, path: Path) -> None:
    for line, other in parts_imported(path):
        if other == part:
            continue
        assert other in LEVEL, f"{path}:{line} imports {other}, which has no row in LAYERS"
        here, there = LEVEL[part], LEVEL[other]
        allowed = there < here or (there == here and here in SIBLINGS_MAY_MEET)
        assert allowed, f"{path}:{line} {part} (row {here}) imports {other} (row {there})"


@pytest.mark.parametrize(("part", "path"), SOURCES)
def test_no_file_outgrows_a_sitting_and_each_says_what_it_is_for(part: str, path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= MAX_FILE_LINES
    assert ast.get_docstring(ast.parse(text)), f"{path} has no docstring"


def test_every_module_has_a_row() -> None:
    parts = {path.stem for path in (ROOT / "zephon_mm").iterdir() if path.suffix == ".py"}
    parts |= {path.parent.name for path in (ROOT / "zephon_mm").glob("*/__init__.py")}
    assert parts - {"__init__"} <= set(LEVEL)


def test_every_package_ships() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    found = {"zephon_mm"}
    for base, name in [(ROOT / "zephon_mm", "zephon_mm")] + [
        (home, f"zephon_mm.{part}") for part, home in HOME.items()
    ]:
        for init in base.rglob("__init__.py"):
            found.add(".".join([name, *init.parent.relative_to(base).parts]))
    assert sorted(listed) == sorted(found)


def test_links_point_at_the_real_folders() -> None:
    for part, home in HOME.items():
        link = ROOT / "zephon_mm" / part
        if link.is_symlink():  # a checkout without symlinks has a text file here
            assert link.resolve() == home


def test_the_whole_can_be_read_by_one_person() -> None:
    formats = {"readers", "processors", "writers"}
    frame = [code_lines(path) for part, path in modules() if part not in formats]
    assert sum(frame) <= MAX_FRAME_LINES
    assert sum(code_lines(path) for _, path in modules()) <= MAX_CODE_LINES


def code_lines(path: Path) -> int:
    """Count the lines that hold code."""
    text = path.read_text()
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NOT_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            lines -= set(range(node.lineno, (node.end_lineno or 0) + 1))
    return len(lines)
