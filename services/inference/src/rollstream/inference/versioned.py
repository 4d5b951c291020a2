"""vLLM's engine client, told which policy version it serves."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.metrics.loggers import StatLoggerBase


@dataclass
class Load:
    """What the scheduler said last: ``kv_usage`` in [0, 1], requests that run and that wait."""

    kv_usage: float = 0.0
    running: int = 0
    waiting: int = 0


def load_recorder(load: Load) -> Callable[..., StatLoggerBase]:
    """A vLLM stat-logger factory that keeps ``load`` current."""

    class Recorder(StatLoggerBase):
        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            pass

        def record(self, scheduler_stats: Any, *args: Any, **kwargs: Any) -> None:
            if scheduler_stats is not None:
                load.kv_usage = scheduler_stats.kv_cache_usage
                load.running = scheduler_stats.num_running_reqs
                load.waiting = scheduler_stats.num_waiting_reqs

        def log_engine_initialized(self) -> None:
            pass

    return Recorder


class VersionedEngine(AsyncLLM):
    """An engine whose weights, version label and prefix-cache salt change together.

    Invariants: every admitted request is salted with the label (``<timeline>:<version>``) of the weights that serve
    it, on every route; requests that arrive during an update wait for its end, so that a salt never meets other
    weights than its own in a prefill that starts after admission. Requests in flight go on over their KV cache.
    """

    label: str

    def serve_version(self, label: str) -> None:
        """State the label of the weights that the engine was started with; called once, before serving."""
        self.label = label
        self._update = asyncio.Lock()
        self._admission = asyncio.Event()
        self._admission.set()

    async def add_request(self, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        """As the base class, after salting the prompt's prefix cache with the version label."""
        if not self._admission.is_set():
            await self._admission.wait()
        return await super().add_request(request_id, salted(prompt, self.label), params, *args, **kwargs)

    async def load(self, directory: Path, label: str, digest: str = "") -> float:
        """Load a version directory and return the seconds that generation stood still.

        Sampling is paused with requests kept, so the label switches between the same two tokens as the weights.
        Always resumes; raises what the worker raised (the label then stays).
        """
        async with self._update:
            started = time.perf_counter()
            self._admission.clear()
            try:
                await self.engine_core.pause_scheduler_async(mode="keep", clear_cache=False)
                await self.start_weight_update()
                await self.update_weights(
                    WeightTransferUpdateRequest(update_info={"directory": str(directory), "digest": digest})
                )
                await self.finish_weight_update(weight_version=label)
                self.label = label
            finally:
                await self.resume_generation()
                self._admission.set()
            return time.perf_counter() - started


def salted(prompt: Any, label: str) -> Any:
    """``prompt`` with the label in its cache salt; the caller's own salt stays part of it."""
    if isinstance(prompt, str):
        return {"prompt": prompt, "cache_salt": label}
    if not isinstance(prompt, dict):
        return prompt
    own = prompt.get("cache_salt")
    return {**prompt, "cache_salt": f"{label}|{own}" if own else label}
