"""From one run configuration to one configuration a component. Pure: reads no file, asks no server."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_config import BaseConfig

from rollstream.core.config import (
    ComponentConfig,
    EnvWorkerConfig,
    InferenceConfig,
    OrchestratorConfig,
    RlConfig,
    RouterConfig,
    TrainerConfig,
)
from rollstream.core.errors import UsageError

Tree = dict[str, Any]

ConfigT = TypeVar("ConfigT", bound=BaseConfig)

PUSHED_DOWN: dict[str, tuple[str, ...]] = {
    "model": ("trainer", "orchestrator", "inference"),
    "max_steps": ("trainer", "orchestrator"),
    "seq_len": ("trainer", "orchestrator", "inference"),
    "seed": ("trainer", "orchestrator"),
    "monitors": ("trainer", "orchestrator"),
    "bus": ("trainer", "orchestrator", "inference", "router"),
    "store": ("trainer", "orchestrator", "inference", "router"),
    "log": ("trainer", "orchestrator", "inference", "router"),
}
"""Value at the top → sections that take it where they leave it unset."""

MUST_AGREE = (("max_steps",), ("model", "name"), ("model", "dtype"))
"""Values that trainer and orchestrator (and the engines, for the model) cannot hold differently."""


@dataclass(frozen=True)
class Resolved:
    """One complete configuration a process. ``inference`` and ``workers`` have one entry a process."""

    trainer: TrainerConfig
    orchestrator: OrchestratorConfig
    router: RouterConfig
    inference: tuple[InferenceConfig, ...]
    workers: tuple[EnvWorkerConfig, ...]

    def components(self) -> dict[str, ComponentConfig]:
        """Component name → configuration; the names are those of log files and resolved configs."""
        named: dict[str, ComponentConfig] = {
            "trainer": self.trainer, "orchestrator": self.orchestrator, "router": self.router,
        }
        named |= {f"inference-{index}": config for index, config in enumerate(self.inference)}
        return named | {f"env-worker-{index}": config for index, config in enumerate(self.workers)}


def resolve(config: RlConfig, run_dir: Path, bus_url: str, store_url: str) -> Resolved:
    """Push shared values down and fill in what only the launcher knows: run directory and server addresses.

    A value that is set at the top and, differently, in a section is an error; so is a value that the components must
    share and do not. Raises :class:`UsageError`.
    """
    shared = config.model_dump(exclude_unset=True, include=set(PUSHED_DOWN))
    shared = {name: value for name, value in shared.items() if value is not None}
    known = {"run_dir": run_dir, "bus": {"url": bus_url}, "store": {"url": store_url}}

    def section(name: str) -> Tree:
        own = getattr(config, name).model_dump(exclude_unset=True)
        pushed = {key: value for key, value in shared.items() if name in PUSHED_DOWN[key]}
        return overlay(fill(own, pushed, name), known)

    orchestrator = build(OrchestratorConfig, section("orchestrator"), "orchestrator")
    resolved = Resolved(
        trainer=build(TrainerConfig, section("trainer"), "trainer"),
        orchestrator=orchestrator,
        router=build(RouterConfig, section("router"), "router"),
        inference=tuple(
            build(InferenceConfig, section("inference") | _named(config.inference, "replica_id", index), "inference")
            for index in range(config.replicas)
        ),
        workers=tuple(
            build(EnvWorkerConfig, section("orchestrator") | {"worker_id": f"worker-{index}"}, "orchestrator")
            for index in range(orchestrator.workers.count)
        ),
    )
    _agree(resolved)
    return resolved


def fill(own: Tree, shared: Tree, path: str) -> Tree:
    """``own`` with the leaves of ``shared`` that it leaves unset. Raises on a leaf that both set differently."""
    result = dict(own)
    for key, value in shared.items():
        where = f"{path}.{key}"
        if key not in own:
            result[key] = value
        elif isinstance(value, dict) and isinstance(own[key], dict):
            result[key] = fill(own[key], value, where)
        elif own[key] != value:
            top = where.partition(".")[2]
            raise UsageError(
                f"{top} = {value!r} at the top and {where} = {own[key]!r} contradict each other",
                hint=f"set it in one place: keep {top} for all components, or drop it and set each section's own",
            )
    return result


def overlay(base: Tree, over: Tree) -> Tree:
    """Deep merge of tables; ``over`` wins."""
    result = dict(base)
    for key, value in over.items():
        nested = isinstance(value, dict) and isinstance(base.get(key), dict)
        result[key] = overlay(base[key], value) if nested else value
    return result


def build(cls: type[ConfigT], values: Tree, section: str) -> ConfigT:
    """Validate a section after the push-down: what was pushed can break a rule that held before."""
    try:
        return cls.model_validate(values)
    except ValidationError as error:
        problems = "; ".join(
            ".".join([section, *map(str, item["loc"])]) + f": {item['msg']}" for item in error.errors()
        )
        raise UsageError(problems, hint="change the value in the configuration file or on the command line") from error


def default_run_name(config: RlConfig, model: str, short_id: str) -> str:
    """``<envs>--<model>--<short id>``, safe as one directory name."""
    sources = "+".join(source.label for source in config.orchestrator.train) or "no-env"
    return "--".join(_plain(part) for part in (sources, Path(model).name, short_id))


def _plain(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._+-]+", "-", text).strip(".-") or "unnamed"


def _named(config: InferenceConfig, field: str, index: int) -> Tree:
    return {field: f"{config.replica_id or 'replica'}-{index}"}


def _agree(resolved: Resolved) -> None:
    holders: dict[str, ComponentConfig] = {"trainer": resolved.trainer, "orchestrator": resolved.orchestrator}
    if resolved.inference:
        holders["inference"] = resolved.inference[0]
    for path in MUST_AGREE:
        found = {name: _at(holder, path) for name, holder in holders.items() if hasattr(holder, path[0])}
        if len(set(found.values())) > 1:
            dotted = ".".join(path)
            told = ", ".join(f"{name} has {value!r}" for name, value in found.items())
            raise UsageError(
                f"the components disagree about {dotted}: {told}", hint=f"set {dotted} once, at the top"
            )


def _at(config: Any, path: tuple[str, ...]) -> Any:
    for part in path:
        config = getattr(config, part)
    return config
