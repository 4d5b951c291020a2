"""The rules of the house that a program can see: who imports whom, and what core must never hold."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SERVICES = ["trainer", "orchestrator", "inference", "router"]


def imported_modules(tree: ast.AST) -> set[str]:
    """Absolute module names that a file imports anywhere, also inside functions."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def sources(folder: Path) -> list[tuple[Path, set[str]]]:
    found = [(path, imported_modules(ast.parse(path.read_text()))) for path in sorted(folder.rglob("*.py"))]
    assert found, f"no sources under {folder}"
    return found


@pytest.mark.parametrize("service", [*SERVICES, "cli", "core"])
def test_nobody_imports_another_service(service: str) -> None:
    home = ROOT / ("services" if service in SERVICES else "packages") / service / "src"
    allowed = {"core", service}
    for path, modules in sources(home):
        others = {name.split(".")[1] for name in modules if name.startswith("rollstream.")} - allowed
        assert not others, f"{path.relative_to(ROOT)} imports rollstream.{{{', '.join(sorted(others))}}}"


@pytest.mark.parametrize("part", ["packages/core", "packages/cli", "services/router"])
def test_light_parts_hold_no_heavy_library(part: str) -> None:
    heavy = {"torch", "vllm", "transformers"}
    for path, modules in sources(ROOT / part / "src"):
        found = heavy & {name.split(".")[0] for name in modules}
        assert not found, f"{path.relative_to(ROOT)} imports {', '.join(sorted(found))}"
