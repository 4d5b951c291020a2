"""A tiny taskset: say a word back. Its reward counts characters in common, so that scripted text earns something."""

from __future__ import annotations

from collections.abc import Iterable

import verifiers.v1 as vf

WORDS = ["apple", "river", "stone", "cloud", "tiger", "lemon", "piano", "grass", "ocean", "candle"]


class WordData(vf.TaskData):
    answer: str = ""


class WordConfig(vf.TasksetConfig):
    count: int = 10
    fail_on: str = ""
    """A word whose scoring raises."""


class WordTask(vf.Task[WordData, vf.State, vf.TaskConfig]):
    fail_on: str = ""

    @vf.reward
    async def overlap(self, task: WordData, trace: vf.Trace) -> float:
        if task.answer == self.fail_on:
            raise RuntimeError(f"no score for {task.answer}")
        reply = trace.last_reply.lower()
        return sum(letter in reply for letter in set(task.answer)) / len(set(task.answer))


class WordTaskset(vf.Taskset[WordTask, WordConfig]):
    def load(self) -> Iterable[WordTask]:
        for index in range(self.config.count):
            word = WORDS[index % len(WORDS)]
            task = WordTask(WordData(prompt=f"Say: {word}", answer=word), self.config.task)
            task.fail_on = self.config.fail_on
            yield task


__all__ = ["WordTaskset"]
