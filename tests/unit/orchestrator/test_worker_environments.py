"""Loading tasksets: what is missing or broken is named with the way out."""

from __future__ import annotations

from pathlib import Path

import pytest
import verifiers.v1 as vf
from verifiers.v1.envs.single_agent.env import SingleAgentEnvConfig

from rollstream.core.config import TrainSourceConfig
from rollstream.core.errors import UsageError
from rollstream.orchestrator.worker.environments import Tasks, count_tasks, is_plain_chat, open_taskset, touches_runtime

TASKSETS = Path(__file__).parents[2] / "support" / "tasksets"


@pytest.fixture(autouse=True)
def tasksets_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TASKSETS))


def test_tasks_are_counted_and_read_by_index() -> None:
    source = TrainSourceConfig(id="toy-words", args={"count": 4})
    assert count_tasks(source) == 4
    tasks = Tasks(open_taskset(source))
    assert tasks[3].data.prompt == "Say: cloud" and tasks[0].data.idx == 0
    with pytest.raises(IndexError):
        tasks[4]


def test_a_missing_environment_names_the_command_that_installs_it() -> None:
    with pytest.raises(UsageError, match="'no-such-thing' is not installed") as raised:
        count_tasks(TrainSourceConfig(id="no-such-thing"))
    assert "pip install ./environments/no_such_thing" in raised.value.hint


def test_wrong_args_are_named() -> None:
    with pytest.raises(UsageError, match="refuses its args: cuont"):
        count_tasks(TrainSourceConfig(id="toy-words", args={"cuont": 4}))


def test_a_taskset_without_tasks_is_refused() -> None:
    with pytest.raises(UsageError, match="has no tasks"):
        count_tasks(TrainSourceConfig(id="toy-words", args={"count": 0}))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import missing_dependency_x\n", "No module named 'missing_dependency_x'"),
        ("__all__ = []\n", "exports no Taskset"),
        ("x = (", "SyntaxError"),
    ],
)
def test_a_broken_taskset_says_what_broke(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, message: str
) -> None:
    name = f"broken_{abs(hash(text))}"
    (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UsageError, match=message):
        open_taskset(TrainSourceConfig(id=name))


class Quiet(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def fine(self, trace: vf.Trace) -> float:
        return 1.0


class Messy(Quiet):
    @vf.reward
    async def reads_files(self, runtime: object) -> float:
        return 0.0


class Prepared(Quiet):
    async def setup(self, trace: vf.Trace, runtime: object) -> None:
        return None


def test_only_tasks_that_leave_their_runtime_alone_may_share_one() -> None:
    config = SingleAgentEnvConfig()
    assert not touches_runtime(Quiet, config)
    assert touches_runtime(Messy, config)
    assert touches_runtime(Prepared, config)


def test_a_taskset_without_tools_or_harness_is_plain_chat() -> None:
    class Boxed(Quiet):
        NEEDS_CONTAINER = True

    assert is_plain_chat("toy-words", SingleAgentEnvConfig(), Quiet)
    assert not is_plain_chat("toy-words", SingleAgentEnvConfig(), Boxed)
