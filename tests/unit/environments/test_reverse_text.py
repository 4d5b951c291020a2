"""The reverse-text taskset: its reward, its phrases and its split."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reverse_text.phrases import held_out, phrases, phrases_of
from reverse_text.similarity import similarity

WORDS = st.text("abcdefgh ", max_size=12)


@pytest.mark.parametrize(
    ("answer", "target", "expected"),
    [
        ("abc", "abc", 1.0), ("abd", "abc", 2 / 3), ("", "abc", 0.0), ("abcd", "abc", 0.75), ("", "", 1.0),
        ("bca", "abc", 0.0),
    ],
)
def test_similarity_counts_right_positions(answer: str, target: str, expected: float) -> None:
    assert similarity(answer, target) == pytest.approx(expected)


@given(WORDS, WORDS)
def test_similarity_is_symmetric_bounded_and_one_only_for_equality(answer: str, target: str) -> None:
    value = similarity(answer, target)
    assert 0.0 <= value <= 1.0
    assert value == similarity(target, answer)
    assert (value == 1.0) == (answer == target)


def test_splits_share_no_phrase_and_keep_the_bounds() -> None:
    train, test = phrases("train"), phrases("test")
    assert len(train) > 800
    assert len(test) >= 100
    assert not set(train) & set(test)
    assert all(4 <= len(phrase) <= 8 and set(phrase) <= set("abcdefghijklmnopqrstuvwxyz ") for phrase in train + test)
    assert all(held_out(phrase) for phrase in test)


def test_no_test_phrase_is_a_part_of_a_train_phrase() -> None:
    train = phrases("train")
    assert not [(shown, phrase) for phrase in phrases("test") for shown in train if phrase in shown]


def test_order_is_fixed_and_not_alphabetical() -> None:
    assert phrases("train") == phrases("train")
    assert phrases("train") != sorted(phrases("train"))


def test_phrases_of_takes_neighbouring_words() -> None:
    assert phrases_of("Oh dear, oh!", 2, 8) == ["oh", "dear", "oh", "oh dear", "dear oh"]
