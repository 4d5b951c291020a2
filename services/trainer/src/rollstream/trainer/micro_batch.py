"""From a bin of the packing plan to the tensors of one forward pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rollstream.trainer.attention import DocumentLayout
from rollstream.trainer.loss import TokenStreams
from rollstream.trainer.packing import DUMMY_TOKENS, Bin
from rollstream.trainer.samples import TrainSample

_STREAMS = ("rl_weights", "ce_weights", "ref_kl_weights")


@dataclass(frozen=True)
class MicroBatch:
    """One packed row of T tokens on one device.

    ``token_ids`` and ``positions`` i64 [T] (positions restart with each document), ``temperature`` f32 [T],
    ``documents`` where they lie, ``streams`` what the loss wants. ``names`` of the samples, for error messages.
    Padding is a document of its own, in no loss component.
    """

    names: tuple[str, ...]
    token_ids: Tensor
    positions: Tensor
    temperature: Tensor
    documents: DocumentLayout
    streams: TokenStreams

    @property
    def tokens(self) -> int:
        return len(self.token_ids)


def build(
    entry: Bin, samples: Mapping[int, TrainSample], device: torch.device | None = None, *, pad_multiple: int = 1
) -> MicroBatch:
    """The micro-batch of ``entry``; ``samples`` holds at least its indices. A dummy becomes a short empty document."""
    device = device or torch.device("cpu")
    documents = [samples[index].cut(length) for index, length in zip(entry.samples, entry.lengths, strict=True)]
    lengths = [len(document) for document in documents]
    padding = -sum(lengths) % pad_multiple if documents else max(DUMMY_TOKENS, pad_multiple)
    if padding:
        lengths.append(padding)

    def joined(label: str, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        parts = [getattr(document, label) for document in documents]
        whole: npt.NDArray[Any] = np.concatenate([*parts, np.zeros(padding, dtype)])
        return whole.astype(dtype, copy=False)

    arrays = {label: joined(label, np.float32) for label in ("logprobs", "advantages", "ref_logprobs", *_STREAMS)}
    firsts = np.cumsum([0, *lengths[:-1]])
    for label in _STREAMS:
        arrays[label][firsts] = 0.0  # nothing stands before it that could predict it
    temperatures = [document.temperature for document in documents] + [1.0] * bool(padding)
    tensors = {label: torch.from_numpy(array).to(device) for label, array in arrays.items()}
    return MicroBatch(
        names=tuple(document.name for document in documents),
        token_ids=torch.from_numpy(joined("token_ids", np.int64)).to(device),
        positions=torch.from_numpy(np.concatenate([np.arange(length) for length in lengths])).to(device),
        temperature=torch.from_numpy(np.repeat(np.asarray(temperatures, np.float32), lengths)).to(device),
        documents=DocumentLayout.of(lengths, device),
        streams=TokenStreams(
            inference_logprobs=tensors["logprobs"],
            advantages=tensors["advantages"],
            sampled=torch.from_numpy(joined("sampled", np.bool_)).to(device),
            rl_weights=tensors["rl_weights"],
            ce_weights=tensors["ce_weights"],
            ref_kl_weights=tensors["ref_kl_weights"],
            ref_logprobs=tensors["ref_logprobs"],
        ),
    )
