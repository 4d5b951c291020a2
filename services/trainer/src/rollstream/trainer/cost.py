"""What a document costs: to balance ranks, and to report FLOPs. Pure arithmetic on a model's shape."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a dense decoder with gated MLPs."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int

    @classmethod
    def of(cls, config: Any) -> ModelShape:
        """From a transformers config."""
        heads = config.num_attention_heads
        return cls(
            hidden=config.hidden_size, layers=config.num_hidden_layers, heads=heads,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            ffn=config.intermediate_size, vocab=config.vocab_size,
        )

    @property
    def matmul_parameters(self) -> int:
        """Parameters that each token is multiplied with, the output head included, the embedding not."""
        attention = 2 * self.hidden * self.heads * self.head_dim + 2 * self.hidden * self.kv_heads * self.head_dim
        return self.layers * (attention + 3 * self.hidden * self.ffn) + self.hidden * self.vocab

    def training_flops(self, length: int) -> int:
        """Forward and backward FLOPs per token of a causal document of ``length`` tokens."""
        return 6 * self.matmul_parameters + 6 * self.layers * self.heads * self.head_dim * length


@dataclass(frozen=True)
class CostModel:
    """Forward cost of a document of T tokens: ``linear·T + quadratic·T²``."""

    linear: int
    quadratic: int

    @classmethod
    def of(cls, shape: ModelShape) -> CostModel:
        """For a model; the output projection counts as hidden × hidden, as the reference implementation has it."""
        attention = shape.hidden * shape.head_dim * (shape.heads + 2 * shape.kv_heads) + shape.hidden**2
        parameters = shape.layers * (attention + 3 * shape.hidden * shape.ffn) + shape.hidden * shape.vocab
        return cls(linear=2 * parameters, quadratic=2 * shape.layers * shape.heads * shape.head_dim)

    def __call__(self, lengths: Iterable[int]) -> int:
        """Cost of a micro-batch of documents that do not attend to each other."""
        return sum(self.linear * length + self.quadratic * length**2 for length in lengths)


TOKENS = CostModel(linear=1, quadratic=0)
"""Cost in tokens, where no model is known."""
