"""The page of guarantees: each test that it names is there."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "GUARANTEES.md").read_text()
NAMED = re.findall(r"`((?:tests|benchmarks)/[\w/]+\.py)(?:::(\w+))?`", PAGE)


@pytest.mark.parametrize(("file", "test"), NAMED, ids=lambda value: value or "file")
def test_what_holds_a_guarantee_is_there(file: str, test: str) -> None:
    tree = ast.parse((ROOT / file).read_text())
    functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    assert not test or test in functions


def test_every_guarantee_names_what_holds_it() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("|") and "---" not in line]
    assert all(re.search(r"\| (`[^`]+`|test) \|$", row) for row in rows)
