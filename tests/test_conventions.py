# SPDX-License-Identifier: Apache-2.0
"""The tests that docs/conventions.md names exist, and it names every regression test."""

import ast
import functools
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "docs" / "conventions.md").read_text()
NAMED = re.findall(r"`(test_\w+\.py)::([\w:]+)`", TEXT)


@functools.cache
def names_in(path: Path) -> set[str]:
    """Every test of a file, as ``test_x`` or ``TestY::test_x``."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef):
            parts = (part for part in node.body if isinstance(part, ast.FunctionDef))
            found.update(f"{node.name}::{part.name}" for part in parts)
    return {name for name in found if name.split("::")[-1].startswith("test_")}


def test_every_named_test_exists():
    rows = re.findall(r"^\| (\d+) \| .*\|$", TEXT, re.M)
    assert len(rows) >= 29 and len(set(rows)) == len(rows)
    missing = [
        f"{file}::{name}"
        for file, name in NAMED
        if name not in names_in(ROOT / "tests" / "trm_ext" / file)
    ]
    assert NAMED and not missing


def test_every_regression_test_is_named():
    file = "test_reported_failures.py"
    regressions = names_in(ROOT / "tests" / "trm_ext" / file)
    unnamed = regressions - {name for where, name in NAMED if where == file}
    assert regressions and not unnamed
