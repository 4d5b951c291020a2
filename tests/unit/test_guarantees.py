"""docs/guarantees.md speaks of tests that exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NAMED = re.compile(r"`((?:[\w/]*/)?test_\w+\.py)?(?:::(test_\w+))?(?:\[[\w-]+\])?`")
"""`file`, `file::test`, `file[parameter]`, or `::test` and `[parameter]` of the file named before."""


def rows() -> list[list[str]]:
    """Cells of each row: claim, mechanism, test, not covered."""
    lines = (ROOT / "docs" / "guarantees.md").read_text().splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    return [row for row in cells if row[2] != "the test that kills it"]


def named() -> Iterator[tuple[str, str]]:
    """(file, test) that the table names; test is "" where a whole file is named."""
    for row in rows():
        for cell in row[2:]:
            file = ""
            for match in NAMED.finditer(cell):
                file = match[1] or file
                if file:
                    yield file, match[2] or ""


def test_every_test_that_is_named_exists() -> None:
    files = {path.relative_to(ROOT / "tests").as_posix(): path for path in (ROOT / "tests").rglob("test_*.py")}
    found = sorted(set(named()))
    assert len([test for _, test in found if test]) > 30
    for file, test in found:
        paths = [path for name, path in files.items() if name == file or name.endswith(f"/{file}")]
        assert len(paths) == 1, f"{file} names {len(paths)} files"
        if test:
            tree = ast.parse(paths[0].read_text())
            defined = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
            assert test in defined, f"{file} has no {test}"


def test_every_claim_has_its_four_parts() -> None:
    assert len(rows()) > 20
    for row in rows():
        assert len(row) == 4, row
        claim, mechanism, test, _ = row
        assert claim and mechanism and NAMED.search(test), row
