"""One leased episode from delivery to acknowledgement."""

from __future__ import annotations

import asyncio
import time

import structlog
from verifiers.v1.clients import ModelContext
from verifiers.v1.trace import Trace
from verifiers.v1.types import SamplingConfig

from rollstream.core import failpoints
from rollstream.core.bus import Bus, EpisodeLease, RecordTooLarge
from rollstream.core.wire import Episode, Rollout
from rollstream.orchestrator.worker.environments import PolicyEnv, Tasks
from rollstream.orchestrator.worker.interception import POLICY_ENDPOINT
from rollstream.orchestrator.worker.policy_client import PolicyClient
from rollstream.orchestrator.worker.trace_to_rollout import errored_rollout, rollout_of

_log = structlog.get_logger(__name__)


class EpisodePlayer:
    """Plays the episodes of one source. Its environment must be serving.

    Whatever happens to an episode (played, failed, timed out, delivered too often) ends as one rollout on its subject;
    only then is the lease acknowledged. Cancelling hands the lease back and releases the router's sessions.
    """

    def __init__(
        self,
        bus: Bus,
        environment: PolicyEnv,
        policy: PolicyClient,
        *,
        model: str,
        worker: str,
        max_deliveries: int,
        timeout: float,
    ) -> None:
        self._bus = bus
        self._environment = environment
        self._tasks = Tasks(environment.taskset)
        self._policy = policy
        self._model = model
        self._worker = worker
        self._max_deliveries = max_deliveries
        self._timeout = timeout

    async def handle(self, lease: EpisodeLease) -> Rollout | None:
        """Play a leased episode; the rollout that this call wrote, None when another one stands already."""
        episode = lease.episode
        subject = self._bus.subjects.rollout(episode.kind, episode.group, episode.member)
        try:
            async with lease.heartbeat():
                if await self._bus.get(subject) is not None:
                    await lease.ack()
                    return None
                if lease.deliveries > self._max_deliveries:
                    return await self._give_up(lease, subject)
                rollout = await self.play(episode)
                try:
                    result = await self._bus.put_once(subject, rollout)
                except RecordTooLarge as error:
                    # It would be as large for every other worker: the episode has failed, not this process.
                    rollout = errored_rollout(episode, self._worker, "RecordTooLarge", str(error), rollout.started)
                    result = await self._bus.put_once(subject, rollout)
                failpoints.hit("after_rollout_before_ack")
                await lease.ack()
        except asyncio.CancelledError:
            await lease.nak()
            raise
        return rollout if result.created else None

    async def _give_up(self, lease: EpisodeLease, subject: str) -> Rollout:
        rollout = errored_rollout(
            lease.episode, self._worker, "TooManyDeliveries",
            f"delivered {lease.deliveries} times without a rollout; it seems to bring its workers down", time.time_ns(),
        )
        _log.error("episode is given up", group=rollout.group, member=rollout.member, deliveries=lease.deliveries)
        await self._bus.put_once(subject, rollout)
        await lease.term()
        return rollout

    async def play(self, episode: Episode) -> Rollout:
        """The rollout of ``episode``; errors and time-outs become errored ones."""
        started = time.time_ns()
        sessions: list[str] = []

        def minted(trace: Trace) -> None:
            self._policy.open(trace.id, episode)
            sessions.append(trace.id)

        try:
            async with asyncio.timeout(self._timeout):
                task = self._tasks[episode.task]
                played = await self._environment.run_episode(task, self._context(episode), on_trace=minted)
            exchanges = [self._policy.exchange(trace.id) for trace in played.traces]
            return rollout_of(episode, played, exchanges, self._worker, started)
        except TimeoutError:
            message = f"not finished after {self._timeout:g} s (workers.episode_timeout)"
            return errored_rollout(episode, self._worker, "EpisodeTimeout", message, started)
        except Exception as error:
            _log.exception("episode failed", group=episode.group, member=episode.member)
            return errored_rollout(episode, self._worker, type(error).__name__, str(error), started)
        finally:
            await asyncio.gather(*(self._policy.close_session(session) for session in sessions))

    def _context(self, episode: Episode) -> ModelContext:
        sampling = episode.sampling
        return ModelContext(
            model=self._model,
            client=POLICY_ENDPOINT,
            sampling=SamplingConfig(temperature=sampling.temperature, max_tokens=sampling.max_tokens),
        )
