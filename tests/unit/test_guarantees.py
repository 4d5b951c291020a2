"""docs/guarantees.md speaks of tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NAMED = re.compile(r"`(test_\w+\.py)::(test_\w+)`")


def test_every_test_that_is_named_exists() -> None:
    named = set(NAMED.findall((ROOT / "docs" / "guarantees.md").read_text()))
    assert len(named) > 30
    files = {path.name: path for path in (ROOT / "tests").rglob("test_*.py")}
    missing = {name for name, _ in named} - set(files)
    assert not missing, f"no such files: {sorted(missing)}"
    for file, test in sorted(named):
        tree = ast.parse(files[file].read_text())
        defined = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
        assert test in defined, f"{file} has no {test}"


def test_every_claim_has_its_four_parts() -> None:
    rows = [line for line in (ROOT / "docs" / "guarantees.md").read_text().splitlines() if line.startswith("| ")]
    for row in rows:
        claim, mechanism, test, _ = (cell.strip() for cell in row.strip("|").split("|"))
        assert claim and mechanism and (NAMED.search(test) or claim == "claim"), row
