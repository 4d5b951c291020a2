"""A starting orchestrator: take the chain, restore what the head commit says, find what happened since."""

from __future__ import annotations

import time

import structlog

from rollstream.core.bus import Bus, CommitChain
from rollstream.core.wire import Event, Group
from rollstream.orchestrator.collector import Collector
from rollstream.orchestrator.dispatcher import Dispatcher
from rollstream.orchestrator.eval_runner import EvalRunner
from rollstream.orchestrator.ledger import Ledger

_log = structlog.get_logger(__name__)


async def reopen_groups(bus: Bus, chain: CommitChain, ledger: Ledger) -> None:
    """Open the groups that the head commit left undecided. One whose record is gone is reported and left out."""
    for known in chain.head.state.open_groups:
        stored = await bus.get(bus.subjects.group(known.group))
        if stored is not None and isinstance(group := stored.record, Group):
            ledger.table.add(group)
            continue
        _log.error("an open group has no record on GROUPS and is given up", group=known.group)
        ledger.rejected.append(known.group)
        await bus.publish_event(
            Event(
                kind="group_lost", component="orchestrator", level="error", created=time.time_ns(),
                message=f"group {known.group} is open in the chain but not on GROUPS; its task is drawn again later",
            )
        )


async def resume(
    bus: Bus, chain: CommitChain, ledger: Ledger, dispatcher: Dispatcher, collector: Collector, evals: EvalRunner
) -> None:
    """Everything from the head commit to the present; the ledger is whole when this returns.

    Order matters: groups are opened before their rollouts are read, and members are offered again only after every
    rollout that stands has been read, so none of them is played twice for nothing.
    """
    await reopen_groups(bus, chain, ledger)
    adopted = await dispatcher.adopt()
    evaluations = evals.open_due()
    await collector.catch_up(await bus.last_sequence("ROLLOUTS"))
    for run in evaluations:
        await evals.offer(run)
    offered = await dispatcher.republish(ledger.table)
    if len(ledger.table) or ledger.committed:
        _log.info(
            "resumed", step=ledger.committed, epoch=chain.head.epoch, open_groups=len(ledger.table),
            adopted=len(adopted), offered_again=offered,
        )
