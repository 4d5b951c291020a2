"""Sources as verifiers environments that are served in this process."""

from __future__ import annotations

import inspect
import itertools
import secrets
from collections.abc import Callable, Iterator
from typing import Any

from pydantic import ValidationError
from verifiers.v1.agent import Agents
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.configs.env import EnvConfig
from verifiers.v1.env import Env
from verifiers.v1.envs.single_agent import SingleAgentEnv
from verifiers.v1.harnesses.null import NullHarnessConfig
from verifiers.v1.runtimes import Runtime, SubprocessConfig, make_runtime
from verifiers.v1.task import Task
from verifiers.v1.taskset import Taskset
from verifiers.v1.utils.loaders import (
    default_harness_id,
    environment_class,
    load_taskset,
    resolve_env_config,
    taskset_class,
    taskset_config_type,
)

from rollstream.core.config import SourceConfig
from rollstream.core.errors import UsageError
from rollstream.orchestrator.worker.interception import InProcessChat, PolicyInterception
from rollstream.orchestrator.worker.policy_client import PolicyClient


def broken_source(source: SourceConfig, error: Exception) -> UsageError:
    """The one message for an environment that cannot be used."""
    module = source.id.rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_").lower()
    # verifiers wraps the import's own error, which names the module that is missing.
    if isinstance(error, ModuleNotFoundError) and isinstance(error.__cause__, ModuleNotFoundError):
        error = error.__cause__
    if isinstance(error, ModuleNotFoundError) and error.name == module:
        return UsageError(
            f"environment {source.id!r} is not installed here",
            hint=f"pip install the package that provides the module {module!r} (those that ship with the project: "
            f"pip install ./environments/{module}), in the environment of the orchestrator and of every env worker",
        )
    if isinstance(error, ValidationError):
        return UsageError(
            f"environment {source.id!r} refuses its args: "
            + "; ".join(f"{'.'.join(map(str, entry['loc']))}: {entry['msg']}" for entry in error.errors()),
            hint="compare the source's args table with the fields of the taskset's config",
        )
    return UsageError(
        f"environment {source.id!r} cannot be loaded: {type(error).__name__}: {error}",
        hint="fix the taskset; `python -c 'import " + module + "'` shows the import's own errors",
    )


def open_taskset(source: SourceConfig) -> Taskset:
    """The taskset of ``source``; raises ``UsageError`` when it is missing or broken."""
    try:
        config = taskset_config_type(source.id).model_validate({**source.args, "id": source.id})
        return load_taskset(config)
    except Exception as error:
        raise broken_source(source, error) from error


def count_tasks(source: SourceConfig) -> int | None:
    """Number of tasks of ``source``, None when it has no end; raises ``UsageError`` for a broken or empty taskset."""
    taskset = open_taskset(source)
    if not taskset.bounded:
        return None
    try:
        count = sum(1 for _ in taskset)
    except Exception as error:
        raise broken_source(source, error) from error
    if count == 0:
        raise UsageError(
            f"environment {source.id!r} has no tasks with args {source.args}", hint="change the source's args"
        )
    return count


class Tasks:
    """The tasks of a taskset by index; an endless one is read as far as it is asked for."""

    def __init__(self, taskset: Taskset) -> None:
        self._iterator: Iterator[Task] = iter(taskset)
        self._read: list[Task] = []

    def __getitem__(self, index: int) -> Task:
        """Task ``index``; raises ``IndexError`` beyond the end."""
        missing = index + 1 - len(self._read)
        if missing > 0:
            self._read += itertools.islice(self._iterator, missing)
        return self._read[index]


class PolicyEnv(Env):
    """Mixed into the environment's own class: every agent without an endpoint of its own plays the policy.

    ``serve`` must be called before ``serving()``. With ``chat`` the agents run the in-process chat loop; with
    ``shared_box`` they are placed into one runtime that all episodes share, which only tasks that never touch their
    runtime may do.
    """

    policy: PolicyClient
    chat: bool
    shared_box: bool
    _policy_interception: PolicyInterception
    _box: Runtime | None

    def serve(self, policy: PolicyClient, *, chat: bool, shared_box: bool) -> None:
        self.policy, self.chat, self.shared_box = policy, chat, shared_box
        self._box = None

    async def start(self) -> None:
        self._policy_interception = PolicyInterception(self.policy)
        await self._policy_interception.__aenter__()
        if self.shared_box:
            self._box = make_runtime(SubprocessConfig(), name=f"rollstream-{secrets.token_hex(6)}")
            await self._box.start()
        await super().start()

    async def stop(self) -> None:
        try:
            await super().stop()
        finally:
            if self._box is not None:
                await self._box.stop()
            await self._policy_interception.__aexit__(None, None, None)

    async def setup(self, agents: Agents) -> None:
        for name in agent_config_fields(self.config):
            agent = getattr(agents, name)
            agent.interception = self._policy_interception
            if self.chat:
                agent.harness = InProcessChat(agent.harness.config, self._policy_interception)
        await super().setup(agents)


class PolicySingleAgentEnv(PolicyEnv, SingleAgentEnv):
    """The environment of every plain taskset: one agent plays one task."""

    async def run(self, task: Task, agents: Agents) -> None:
        await agents.agent.run(task, runtime=self._box)


def load_environment(source: SourceConfig, policy: PolicyClient) -> PolicyEnv:
    """The environment of ``source`` with ``policy`` as its model; raises ``UsageError`` for a missing or broken one."""
    try:
        config = resolve_env_config({"taskset": {**source.args, "id": source.id}})
        own = environment_class(source.id)
        tasks = taskset_class(source.id).task_type()
        chat = is_plain_chat(source.id, config, tasks)
        config = config.model_copy(update=_local_roles(config, chat))
        single = own is SingleAgentEnv
        mixed = {"__module__": own.__module__}
        env = (PolicySingleAgentEnv if single else type(own.__name__, (PolicyEnv, own), mixed))(config)
        env.serve(policy, chat=chat, shared_box=single and chat and not touches_runtime(tasks, config))
        return env
    except Exception as error:
        raise broken_source(source, error) from error


def is_plain_chat(taskset_id: str, config: EnvConfig, tasks: type[Task]) -> bool:
    """Whether the taskset needs nothing but chat turns: no harness of its own, no tools, no container."""
    pinned = any(role.harness is not None for role in agent_config_fields(config).values())
    tools = bool(tasks.toolsets(config.taskset.task)) or bool(taskset_class(taskset_id).toolsets(config.taskset))
    return not pinned and not tools and not tasks.NEEDS_CONTAINER and default_harness_id(taskset_id) == "bash"


def touches_runtime(tasks: type[Task], config: EnvConfig) -> bool:
    """Whether tasks set up, tear down or score in their runtime, so that episodes must not share one."""
    if tasks.setup is not Task.setup or tasks.finalize is not Task.finalize:
        return True
    hooks: list[Callable[..., Any]] = [
        function
        for _, function in inspect.getmembers(tasks, inspect.isfunction)
        if any(getattr(function, kind, False) for kind in ("reward", "metric", "stop"))
    ]
    plugged = config.taskset.task
    return bool(plugged.judges or plugged.rewards or plugged.metrics) or any(
        "runtime" in inspect.signature(hook).parameters for hook in hooks
    )


def _local_roles(config: EnvConfig, chat: bool) -> dict[str, Any]:
    """Roles that pin no runtime run on this machine; plain ones in the chat harness."""
    roles = {}
    for name, role in agent_config_fields(config).items():
        update: dict[str, Any] = {}
        if "runtime" not in role.model_fields_set:
            update["runtime"] = SubprocessConfig()
        if chat:
            update["harness"] = NullHarnessConfig(id="null")
        roles[name] = role.model_copy(update=update)
    return roles
