"""Attention over a packed row in which documents cannot see each other.

Registered with transformers under its own name through ``AttentionInterface``. On CPU, and on GPUs without variable-
length flash attention, the documents are gathered into padded rows of similar length, so that packing costs no
attention between documents and no quadratic mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

ATTENTION = "rollstream_documents"
"""Name in ``attn_implementation``."""


@dataclass(frozen=True)
class DocumentLayout:
    """Where the documents of a packed row of T tokens lie.

    ``rows``: index tensors i64 [B, L], one a length class; entry T stands for padding at the end of a document.
    ``inverse`` i64 [T]: position of each token in the concatenation of the flattened rows.
    ``boundaries`` i32 [documents + 1]: cumulative lengths, as varlen kernels take them.
    """

    rows: tuple[Tensor, ...]
    inverse: Tensor
    boundaries: Tensor
    longest: int

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> DocumentLayout:
        """For documents of these lengths, in order."""
        starts = [sum(lengths[:index]) for index in range(len(lengths) + 1)]
        total = starts[-1]
        classes: dict[int, list[int]] = {}
        for document, length in enumerate(lengths):
            classes.setdefault(length.bit_length(), []).append(document)
        rows, inverse, offset = [], torch.empty(total, dtype=torch.int64), 0
        for members in classes.values():
            width = max(lengths[document] for document in members)
            row = torch.full((len(members), width), total, dtype=torch.int64)
            for line, document in enumerate(members):
                positions = torch.arange(lengths[document])
                row[line, : lengths[document]] = starts[document] + positions
                inverse[starts[document] : starts[document + 1]] = offset + line * width + positions
            rows.append(row.to(device))
            offset += row.numel()
        return cls(
            tuple(rows), inverse.to(device), torch.tensor(starts, dtype=torch.int32, device=device), max(lengths)
        )


def document_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    documents: DocumentLayout | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each document. query [1, H, T, D], key and value [1, K, T, D] → [1, T, H, D].

    transformers calls this for every layer; ``documents`` travels from the model's call as a keyword.
    """
    if documents is None:
        raise ValueError("document attention needs documents=DocumentLayout.of(lengths) in the model's call")
    if attention_mask is not None or query.shape[0] != 1:
        raise ValueError("document attention takes one packed row and no mask")
    if sliding_window is not None and sliding_window < documents.longest:
        raise ValueError(
            f"{type(module).__name__} slides a window of {sliding_window} tokens, a document has {documents.longest}: "
            "sliding-window attention is not supported; lower seq_len to the window"
        )
    # Token-major views: [T, heads, D].
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    attend = _varlen if _has_varlen(query) else _padded_rows
    return attend(q, k, v, documents, scaling).unsqueeze(0), None


def _padded_rows(query: Tensor, key: Tensor, value: Tensor, documents: DocumentLayout, scaling: float | None) -> Tensor:
    groups = query.shape[1] // key.shape[1]
    # One more token of zeros: what padding reads, and where its gradient goes.
    padded = [F.pad(tensor, (0, 0, 0, 0, 0, 1)) for tensor in (query, key, value)]
    outputs = []
    for row in documents.rows:
        lines, width = row.shape
        flat = row.reshape(-1)
        q, k, v = (
            tensor.index_select(0, flat).view(lines, width, *tensor.shape[1:]).transpose(1, 2) for tensor in padded
        )
        if groups > 1:
            k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        # Padding stands behind every real token of its line: causality alone hides it.
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling)
        outputs.append(mixed.transpose(1, 2).reshape(lines * width, *query.shape[1:]))
    return torch.cat(outputs).index_select(0, documents.inverse)


def _has_varlen(query: Tensor) -> bool:
    """Whether torch's variable-length flash attention can take this. UNVERIFIED: no test has run it on a GPU yet."""
    return query.is_cuda and query.dtype in (torch.float16, torch.bfloat16) and query.shape[-1] <= 256


def _varlen(query: Tensor, key: Tensor, value: Tensor, documents: DocumentLayout, scaling: float | None) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    out = varlen_attn(
        query.contiguous(), key.contiguous(), value.contiguous(),
        documents.boundaries, documents.boundaries, documents.longest, documents.longest,
        scale=scaling, window_size=(-1, 0), enable_gqa=query.shape[1] != key.shape[1],
    )
    return out if isinstance(out, Tensor) else out[0]
