"""The policy: a HF causal LM that scores packed tokens, sharded by FSDP2 when there is more than one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, PreTrainedModel

from rollstream.core.config import ModelConfig
from rollstream.core.errors import UsageError
from rollstream.trainer.alignment import CHUNK_ELEMENTS, token_scores
from rollstream.trainer.attention import ATTENTION, document_attention
from rollstream.trainer.cost import CostModel, ModelShape
from rollstream.trainer.micro_batch import MicroBatch
from rollstream.trainer.ranks import Ranks

AttentionInterface.register(ATTENTION, document_attention)

_UNSUPPORTED = {
    "final_logit_softcapping": "soft-capped logits", "logit_scale": "scaled logits", "logits_scaling": "scaled logits",
}


class Policy(nn.Module):
    """A causal LM in eval mode (no dropout: the trainer's logprobs must equal the sampler's), with gradients.

    Lifecycle: load → optionally :meth:`shard` once → forward and backward, in step with the other ranks.
    """

    def __init__(self, hf: PreTrainedModel) -> None:
        super().__init__()
        for name, what in _UNSUPPORTED.items():
            if getattr(hf.config, name, None) not in (None, 1, 1.0):
                raise UsageError(f"model {hf.config._name_or_path}: {what} ({name}) are not supported by the trainer")
        self.hf = hf.eval()  # type: ignore[no-untyped-call]
        self.shape = ModelShape.of(hf.config)
        self.cost = CostModel.of(self.shape)
        self.chunk_tokens = max(1, CHUNK_ELEMENTS // self.shape.vocab)

    @classmethod
    def load(cls, config: ModelConfig, device: torch.device | None = None) -> Policy:
        """From a directory or hub id; raises :class:`UsageError` when it is missing or not a causal LM."""
        try:
            hf = AutoModelForCausalLM.from_pretrained(
                config.name, dtype=getattr(torch, config.dtype), attn_implementation=ATTENTION,
                trust_remote_code=config.trust_remote_code,
            )
        except (OSError, ValueError, KeyError) as error:
            raise _cannot_load(config, error) from error
        return cls(hf).to(device or torch.device("cpu"))

    @classmethod
    def empty(cls, config: ModelConfig, source: Path | str | None = None) -> Policy:
        """The architecture alone, on CPU, its values arbitrary; ``source`` replaces the directory of ``config``."""
        name = str(source or config.name)
        try:
            shape = AutoConfig.from_pretrained(name, trust_remote_code=config.trust_remote_code)
            hf = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                shape, dtype=getattr(torch, config.dtype), attn_implementation=ATTENTION,
                trust_remote_code=config.trust_remote_code,
            )
        except (OSError, ValueError, KeyError) as error:
            raise _cannot_load(config, error) from error
        return cls(hf)

    def shard(self, ranks: Ranks) -> Policy:
        """Shard parameters, gradients and optimiser state over the ranks; gradients are summed, not averaged."""
        if ranks.world == 1:
            return self
        mesh = init_device_mesh(ranks.device.type, (ranks.world,))
        precision = MixedPrecisionPolicy(reduce_dtype=torch.float32)
        for layer in self.hf.base_model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=precision)
        fully_shard(self, mesh=mesh, mp_policy=precision)
        for module in self.modules():
            if isinstance(module, FSDPModule):
                # The loss is already divided by the global token counts.
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        return self

    @property
    def tied(self) -> bool:
        """Whether the output head is the embedding."""
        return bool(self.hf.config.tie_word_embeddings)

    def forward(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Logprob and entropy of each token, f32 [T], aligned to the token; 0 or meaningless at document starts."""
        out = self.hf.base_model(
            input_ids=batch.token_ids.unsqueeze(0), position_ids=batch.positions.unsqueeze(0),
            use_cache=False, documents=batch.documents,
        )
        return token_scores(
            out.last_hidden_state[0], cast(Any, self.hf.get_output_embeddings()), batch.token_ids, batch.temperature,
            chunk_tokens=self.chunk_tokens,
        )


def _cannot_load(config: ModelConfig, error: Exception) -> UsageError:
    first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return UsageError(
        f"model {config.name!r} cannot be loaded: {first}",
        hint="give --model.name a directory with config.json and safetensors, or a hub id that is cached here",
    )
