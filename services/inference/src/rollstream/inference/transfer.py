"""vLLM's side of a weight update by shared directory: one atomic worker call, from files to the live model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_reload, initialize_layerwise_reload

from rollstream.inference.weights import HALF_LOADED, verified_files


@dataclass
class NoInitInfo(WeightTransferInitInfo):
    """Files need no rendezvous."""


@dataclass
class DirectoryUpdateInfo(WeightTransferUpdateInfo):
    """One version directory (safetensors and manifest.json) and the content digest it must have ("" means any)."""

    directory: str
    digest: str = ""


class HalfLoadedError(RuntimeError):
    """The model has been touched and is not whole: the engine must be restarted."""


class FilesystemTransferEngine(WeightTransferEngine[NoInitInfo, DirectoryUpdateInfo]):
    """Loads a verified version directory into the live model.

    Invariant: the model is untouched unless every file has the size and sha256 its manifest promises and its
    tensors are those of the model. Start and finish do nothing, because a layerwise reload that spans calls
    leaves a model that cannot run in between.
    """

    init_info_cls = NoInitInfo
    update_info_cls = DirectoryUpdateInfo
    supports_draft_weight_update = False

    def init_transfer_engine(self, init_info: NoInitInfo) -> None:
        """Nothing to set up."""

    def start_weight_update(self) -> None:
        """Nothing to prepare."""

    def finish_weight_update(self) -> None:
        """Nothing left to do."""

    def shutdown(self) -> None:
        """Nothing to release."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """As the base class, with a device synchronisation only where there is a device."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: DirectoryUpdateInfo) -> None:
        """Verify, then load. Raises ``WeightsDamaged`` (model untouched) or :class:`HalfLoadedError`."""
        directory = Path(update_info.directory)
        with contextlib.ExitStack() as stack:
            files = verified_files(directory, update_info.digest)
            # Opened before the model is touched: a directory that is pruned meanwhile stays readable.
            shards = [stack.enter_context(safe_open(file, framework="pt")) for file in files]
            try:
                self._load(_tensors(shards))
            except Exception as error:
                raise HalfLoadedError(
                    f"{HALF_LOADED}: {directory}: {type(error).__name__}: {error}; restart the engine"
                ) from error

    @torch.no_grad()
    def _load(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        # As vLLM's own reload_weights: each layer is materialised, filled and packed, then copied into the storage
        # that the kernels hold.
        with torch.device(self.device):
            initialize_layerwise_reload(self.model)
            expected = {name for name, _ in self.model.named_parameters()}
            loaded: set[str] = self.model.load_weights(tensors)  # type: ignore[operator]
            finalize_layerwise_reload(self.model, self.model_config)  # type: ignore[no-untyped-call]
        if missing := expected - loaded - self._tied_names():
            raise ValueError(f"no tensor for {', '.join(sorted(missing)[:5])}: the old values are still in place")
        self._repack_tied_head()

    def _tied_names(self) -> set[str]:
        tied = getattr(self.model_config.hf_text_config, "tie_word_embeddings", False)
        return {"lm_head.weight"} if tied else set()

    def _repack_tied_head(self) -> None:
        """A tied lm_head owns a packed copy of the embedding on CPU, which the reload does not refresh."""
        head = getattr(self.model, "lm_head", None)
        method = getattr(head, "quant_method", None)
        if self._tied_names() and method is not None:
            method.process_weights_after_loading(head)


def _tensors(shards: list[Any]) -> Iterator[tuple[str, torch.Tensor]]:
    for shard in shards:
        for name in shard.keys():  # noqa: SIM118 — not a mapping
            yield name, shard.get_tensor(name)
