"""The verifiers v1 taskset: a phrase in, the same phrase backwards out."""

from __future__ import annotations

from collections.abc import Iterable

import verifiers.v1 as vf

from reverse_text.phrases import Split, phrases
from reverse_text.similarity import similarity


class ReverseTextConfig(vf.TasksetConfig):
    """Which phrases are asked."""

    split: Split = "train"
    """train or test; the splits share no phrase."""

    min_chars: int = 4
    """Shortest phrase."""

    max_chars: int = 8
    """Longest phrase."""


class ReverseTextData(vf.TaskData):
    """One phrase; ``answer`` is what earns the full reward."""

    answer: str


class ReverseTextTask(vf.Task[ReverseTextData, vf.State, vf.TaskConfig]):
    """Scores the last reply against the reversed phrase."""

    @vf.reward
    async def similarity(self, trace: vf.Trace) -> float:
        """Share of right characters, in [0, 1]."""
        return similarity((trace.last_reply or "").strip(), self.data.answer)


class ReverseTextTaskset(vf.Taskset[ReverseTextTask, ReverseTextConfig]):
    """Phrases of 1–2 words out of public-domain sentences."""

    def load(self) -> Iterable[ReverseTextTask]:
        for phrase in phrases(self.config.split, self.config.min_chars, self.config.max_chars):
            yield ReverseTextTask(ReverseTextData(prompt=phrase, answer=phrase[::-1]), self.config.task)
