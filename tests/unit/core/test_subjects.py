"""Subjects: names never change the shape of a subject."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from rollstream.core.bus import Subjects, group_id, token


@given(st.text(max_size=30))
def test_a_token_is_one_safe_token(name: str) -> None:
    assert re.fullmatch(r"[A-Za-z0-9_=-]+", token(name))


@given(st.text(max_size=12), st.text(max_size=12))
def test_tokens_are_injective(one: str, other: str) -> None:
    assert (token(one) == token(other)) == (one == other)


def test_shapes() -> None:
    subjects = Subjects("r.1")
    assert subjects.group("g 1") == "rs.r=2E1.groups.g=201"
    assert subjects.rollout("train", "g", 3) == "rs.r=2E1.rollouts.train.g.3"
    assert subjects.everything("COMMITS") == subjects.commits == "rs.r=2E1.commits"
    assert subjects.everything("EPISODES") == "rs.r=2E1.episodes.>"
    assert subjects.stream("BLOBS") == "RS_r=2E1_BLOBS"


def test_group_ids_tell_kinds_timelines_and_versions_apart() -> None:
    names = [
        group_id(kind, timeline, source, index, version)
        for kind, version in (("train", None), ("eval", 0), ("eval", 7))
        for timeline in (1, 2)
        for source in ("a", "b")
        for index in (1, 12)
    ]
    assert len(set(names)) == len(names)
