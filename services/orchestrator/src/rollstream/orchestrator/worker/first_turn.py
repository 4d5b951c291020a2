"""Committing the first turn of a trace: most episodes have no other."""

from __future__ import annotations

from verifiers.v1.graph import MessageNode, PendingTurn
from verifiers.v1.types import Response


def commit_first_turn(turn: PendingTurn, response: Response) -> int:
    """Add the first turn to its trace and return the assistant node's id, as ``turn.commit(response)`` would.

    Only for an empty trace and a text-only turn without tools. ``commit`` builds its nodes through pydantic's
    ``model_construct``, which inspects the signature of every default factory anew: 2 ms a turn, here 0.1.
    """
    trace, tokens = turn.trace, response.tokens
    if trace.nodes or tokens is None or turn.tools or tokens.routed_experts or tokens.mm_token_type_id_map:
        raise ValueError("only the first, text-only turn of a trace can be committed this way")
    spans = tokens.message_spans or []
    content = tokens.is_content if tokens.is_content and len(tokens.is_content) == len(tokens.prompt_ids) else None
    cursor = 0
    parent: int | None = None
    for index, message in enumerate(turn.prompt):
        span = spans[index] if index < len(spans) else None
        end = span[1] if span is not None else cursor
        ids = tokens.prompt_ids[cursor:end]
        trace.nodes.append(
            MessageNode(
                parent=parent,
                message=message,
                token_ids=ids,
                renderer_token_ids=list(ids),
                mask=[False] * len(ids),
                is_content=content[cursor:end] if content is not None else [],
            )
        )
        parent, cursor = len(trace.nodes) - 1, end
    prompt = tokens.prompt_ids[cursor:]
    ids = [*prompt, *tokens.completion_ids]
    mask = [False] * len(prompt) + [True] * len(tokens.completion_ids)
    trace.nodes.append(
        MessageNode(
            parent=parent,
            message=response.message,
            sampled=True,
            token_ids=ids,
            renderer_token_ids=list(ids),
            mask=mask,
            is_content=list(mask) if content is not None else [],
            logprobs=tokens.completion_logprobs,
        )
    )
    turn.abandon()  # the preview goes; the graph's index is rebuilt from the nodes by whoever needs it
    return len(trace.nodes) - 1
