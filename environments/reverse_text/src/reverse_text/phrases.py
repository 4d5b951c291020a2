"""Short phrases out of real sentences, with a split that does not leak."""

from __future__ import annotations

import hashlib
import re
from importlib.resources import files
from typing import Literal

Split = Literal["train", "test"]

TEST_SHARE = 0.12
"""Share of the phrases that is held out."""


def sentences() -> list[str]:
    """The shipped public-domain sentences, one a line."""
    return files("reverse_text").joinpath("data/sentences.txt").read_text(encoding="utf-8").splitlines()


def phrases_of(text: str, min_chars: int, max_chars: int, max_words: int = 2) -> list[str]:
    """Runs of 1 to ``max_words`` neighbouring words whose length fits; lower case, letters and blanks only."""
    words = re.findall(r"[a-z]+", text.lower())
    runs = (
        " ".join(words[start : start + count])
        for count in range(1, max_words + 1)
        for start in range(len(words) - count + 1)
    )
    return [run for run in runs if min_chars <= len(run) <= max_chars]


def held_out(phrase: str) -> bool:
    """Whether ``phrase`` is kept out of the train split; a function of its text, so the splits never share one."""
    rank = int.from_bytes(hashlib.sha256(phrase.encode()).digest()[:8], "big")
    return rank < TEST_SHARE * 2**64


def phrases(split: Split, min_chars: int = 4, max_chars: int = 8) -> list[str]:
    """The distinct phrases of ``split`` in a fixed order that does not follow the alphabet.

    A phrase of the test split occurs in no phrase of the train split, not even as a part of it.
    """
    found = {phrase for sentence in sentences() for phrase in phrases_of(sentence, min_chars, max_chars)}
    ordered = sorted(found, key=lambda phrase: hashlib.sha256(b"order" + phrase.encode()).digest())
    train = [phrase for phrase in ordered if not held_out(phrase)]
    if split == "train":
        return train
    shown = "\n".join(train)
    return [phrase for phrase in ordered if held_out(phrase) and phrase not in shown]
