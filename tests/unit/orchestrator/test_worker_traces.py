"""From verifiers' message graph to branches: every sampled token once, with the version that sampled it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import verifiers.v1 as vf
from renderers import RenderedTokens
from verifiers.v1.episode import EnvInfo
from verifiers.v1.episode import Episode as VerifiersEpisode
from verifiers.v1.graph import prepare_turn
from verifiers.v1.trace import AgentInfo, TraceTask
from verifiers.v1.types import AssistantMessage, Messages, Response, TurnTokens, Usage, UserMessage

from rollstream.core.wire import Episode, Sampling
from rollstream.orchestrator.worker.answer import Completion, PolicySpan
from rollstream.orchestrator.worker.first_turn import commit_first_turn
from rollstream.orchestrator.worker.policy_client import Exchange, turn_seed
from rollstream.orchestrator.worker.trace_to_rollout import MissingEvidence, branches_of, failure_of, rollout_of

EPISODE = Episode(
    group="g", member=0, kind="train", source="w", task=3, sampling=Sampling(temperature=0.7), timeline=1
)


def make_trace() -> vf.Trace:
    data = vf.TaskData(prompt="q")
    return vf.Trace(task=TraceTask(type="Task", data=data), agent=AgentInfo(config=vf.AgentConfig()))


def response(text: str, prompt: Sequence[int], completion: Sequence[int], spans: object = None) -> Response:
    tokens = TurnTokens.model_construct(
        prompt_ids=list(prompt), completion_ids=list(completion), completion_logprobs=[-0.25] * len(completion),
        message_spans=spans, renderer_prompt_ids=None, bridged=False, is_content=None, mm_placeholders=None,
        mm_token_type_id_map=None, routed_experts=None, sampling_mask=None,
    )
    usage = Usage(prompt_tokens=len(prompt), completion_tokens=len(completion))
    return Response(
        id="r", created=0, model="m", message=AssistantMessage(content=text), finish_reason="stop", usage=usage,
        tokens=tokens,
    )


def sampled(tokens: Sequence[int], *spans: tuple[int, int, int]) -> Completion:
    return Completion("r", list(tokens), [-0.25] * len(tokens), tuple(PolicySpan(1, *span) for span in spans), "stop")


def test_the_short_cut_for_first_turns_commits_what_verifiers_commits() -> None:
    messages: Messages = [vf.SystemMessage(content="s"), UserMessage(content="q")]
    rendered = RenderedTokens(
        token_ids=[1, 2, 3, 4, 5, 6], message_indices=[0, 0, 1, 1, -1, -1], message_roles=["system", "user"]
    )
    answer = response("a", rendered.token_ids, [10, 11], rendered.message_token_spans())
    theirs, ours = make_trace(), make_trace()
    prepare_turn(theirs, messages).commit(answer)
    turn = prepare_turn(ours, messages)
    ours.preview(turn, turn.tail)
    assert commit_first_turn(turn, answer) == 2
    skip = {"timestamp"}
    for our, their in zip(ours.nodes, theirs.nodes, strict=True):
        assert our.model_dump(exclude=skip) == their.model_dump(exclude=skip)
    assert [node.renderer_token_ids for node in ours.nodes] == [node.renderer_token_ids for node in theirs.nodes]
    assert ours.pending == []
    following: Messages = [*messages, AssistantMessage(content="a"), UserMessage(content="more")]
    assert prepare_turn(ours, following).prefix_node_ids == prepare_turn(theirs, following).prefix_node_ids == [0, 1, 2]
    with pytest.raises(ValueError, match="first"):
        commit_first_turn(prepare_turn(ours, following), answer)


def two_branches() -> tuple[vf.Trace, Exchange]:
    """q → a, then two different follow-ups on the same a: a's tokens are a prefix of both branches."""
    trace = make_trace()
    ask: Messages = [UserMessage(content="q")]
    prepare_turn(trace, ask).commit(response("a", [1, 2, 3], [10, 11], [(0, 2)]))
    for text, follow, reply in (("x", 20, [30]), ("y", 21, [31, 32])):
        messages = [*ask, AssistantMessage(content="a"), UserMessage(content=text)]
        prompt = [1, 2, 3, 10, 11, follow, 4]
        prepare_turn(trace, messages).commit(response(f"to {text}", prompt, reply, [None, None, (5, 6)]))
    exchange = Exchange(EPISODE)
    exchange.completions = [
        sampled([10, 11], (4, 0, 1), (5, 1, 2)), sampled([30], (5, 0, 1)), sampled([31, 32], (6, 0, 2)),
    ]
    return trace, exchange


def test_a_shared_prefix_trains_once_and_spans_sit_on_their_tokens() -> None:
    first, second = branches_of(*two_branches())
    assert first.token_ids.numpy().tolist() == [1, 2, 3, 10, 11, 20, 4, 30]
    assert first.sampled.numpy().tolist() == [False] * 3 + [True] * 2 + [False] * 2 + [True]
    assert [(s.version, s.start, s.end) for s in first.spans] == [(4, 3, 4), (5, 4, 5), (5, 7, 8)]
    assert second.token_ids.numpy().tolist() == [1, 2, 3, 10, 11, 21, 4, 31, 32]
    assert second.sampled.numpy().tolist() == [False] * 7 + [True] * 2
    assert [(s.version, s.start, s.end) for s in second.spans] == [(6, 7, 9)]
    assert second.logprobs.numpy().tolist() == [0.0] * 7 + [-0.25] * 2
    assert first.temperature == 0.7


def test_a_completion_that_the_policy_is_not_known_to_have_sampled_is_refused() -> None:
    trace, exchange = two_branches()
    exchange.completions.pop()
    with pytest.raises(MissingEvidence, match="2 sampled tokens"):
        branches_of(trace, exchange)


def test_equal_completions_keep_their_own_versions() -> None:
    trace = make_trace()
    for version, text in ((1, "q"), (2, "other")):
        prepare_turn(trace, [UserMessage(content=text)]).commit(response("a", [version, 3], [10], [(0, 1)]))
    exchange = Exchange(EPISODE, completions=[sampled([10], (1, 0, 1)), sampled([10], (2, 0, 1))])
    assert [branch.spans[0].version for branch in branches_of(trace, exchange)] == [1, 2]


def played(trace: vf.Trace, *, ok: bool = True) -> VerifiersEpisode:
    episode = VerifiersEpisode(env=EnvInfo(id="w"), task=trace.task)
    episode.traces.append(trace)
    episode.ok = trace.ok = ok
    return episode


def test_a_rollout_carries_reward_parts_messages_and_the_episode_it_belongs_to() -> None:
    trace, exchange = two_branches()
    trace.record_reward("one", 0.5, weight=2.0)
    trace.record_metric("length", 3)
    rollout = rollout_of(EPISODE, played(trace), [exchange], "worker-1", started=5)
    assert rollout.error is None and rollout.reward == 1.0 and rollout.reward_parts == {"one": 1.0}
    assert rollout.metrics == {"length": 3.0} and rollout.turns == 3 and rollout.task == 3
    assert rollout.messages[-1] == {"role": "assistant", "content": "to y"}


def test_a_failed_episode_becomes_an_errored_rollout_without_tokens() -> None:
    trace, exchange = two_branches()
    trace.record_error(RuntimeError("no\nscore"))
    episode = played(trace, ok=False)
    assert failure_of(episode) == ("RuntimeError", "no\nscore")
    rollout = rollout_of(EPISODE, episode, [exchange], "w", started=5)
    assert rollout.error is not None and rollout.error.message == "no score"
    assert rollout.reward is None and rollout.branches == ()


def test_members_and_turns_have_seeds_of_their_own() -> None:
    seeded = Episode(
        group="g", member=0, kind="train", source="w", task=3, sampling=Sampling(seed=1), timeline=1
    )
    other = Episode(group="g", member=1, kind="train", source="w", task=3, sampling=Sampling(seed=1), timeline=1)
    seeds = {turn_seed(seeded, 0), turn_seed(seeded, 1), turn_seed(other, 0)}
    assert len(seeds) == 3 and turn_seed(seeded, 0) in seeds
