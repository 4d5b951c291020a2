"""The kept model of the example is used again only while its recipe stands."""

from __future__ import annotations

import shutil
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "reverse-text"


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A copy of the example's recipe that a test may change."""
    for name in ("recipe.py", "model.py", "warmup.py"):
        shutil.copy(EXAMPLE / name, tmp_path)
    return tmp_path


def load(directory: Path) -> ModuleType:
    spec = spec_from_file_location("recipe_under_test", directory / "recipe.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_model_is_current_only_with_the_stamp_of_this_recipe(tmp_path: Path) -> None:
    recipe = load(EXAMPLE)
    assert not recipe.is_current(tmp_path / "missing")
    assert not recipe.is_current(tmp_path)
    (tmp_path / recipe.STAMP).write_text(recipe.digest() + "\n")
    assert recipe.is_current(tmp_path)
    (tmp_path / recipe.STAMP).write_text(recipe.digest(steps=recipe.STEPS + 1) + "\n")
    assert not recipe.is_current(tmp_path)


def test_the_digest_follows_the_sources_and_not_the_place(copied: Path) -> None:
    before = load(EXAMPLE).digest()
    assert load(copied).digest() == before
    warmup = copied / "warmup.py"
    changed = warmup.read_text().replace("NOISE = 0.35", "NOISE = 0.3")
    assert changed != warmup.read_text()
    warmup.write_text(changed)
    assert load(copied).digest() != before
