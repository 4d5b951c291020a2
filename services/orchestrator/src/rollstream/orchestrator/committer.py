"""Appends batches to the chain."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from rollstream.core.bus import CommitChain
from rollstream.core.wire import Batch
from rollstream.orchestrator.batch_builder import BatchContent, build_batch
from rollstream.orchestrator.credit import CreditAssignment
from rollstream.orchestrator.groups import GroupInProgress
from rollstream.orchestrator.ledger import Ledger


class Committer:
    """Turns finished groups into the next batch of the chain, and the ledger into the state of that commit.

    Invariant: the ledger changes only after the append was acknowledged, except for groups that leave the table, which
    a failed append (the process ends with it) leaves to the next orchestrator.
    """

    def __init__(
        self,
        chain: CommitChain,
        ledger: Ledger,
        credit_of: Callable[[str], CreditAssignment],
        *,
        prune_zero_advantage: bool,
    ) -> None:
        self._chain = chain
        self._ledger = ledger
        self._credit_of = credit_of
        self._prune = prune_zero_advantage

    async def commit(self, groups: Sequence[GroupInProgress], metrics: dict[str, float]) -> BatchContent:
        """Append batch ``committed + 1`` of ``groups``; raises ``StaleWriter`` when the chain was taken over."""
        ledger = self._ledger
        content = build_batch(
            ledger.committed + 1, groups, self._credit_of, prune_zero_advantage=self._prune
        )
        content = replace(content, metrics={**content.metrics, **metrics})
        for entry in groups:
            ledger.table.remove(entry.group.group)
        await self._chain.append(
            Batch(
                **self._chain.batch_fields(),  # type: ignore[arg-type]
                step=content.step,
                version=content.step - 1,
                samples=content.samples,
                rejected=(*ledger.rejected, *content.rejected),
                state=ledger.state(),
                metrics=content.metrics,
            )
        )
        ledger.committed = content.step
        ledger.rejected.clear()
        ledger.failed_in_a_row = 0
        return content
