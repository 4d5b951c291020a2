"""One training sample: the tokens of a branch with everything the loss wants to know about them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rollstream.core.errors import EXIT_USAGE, RollstreamError
from rollstream.core.wire import Array, Branch, Sample

FloatArray = npt.NDArray[np.float32]


class BadSample(RollstreamError):
    """A sample cannot be trained. The message names the rollout, the token and the reason; a restart meets it again."""

    exit_code = EXIT_USAGE


@dataclass(frozen=True, eq=False)
class TrainSample:
    """Arrays of one length T, each aligned to the token it describes.

    ``token_ids`` i64, ``sampled`` bool (the rl loss mask), the rest f32: ``logprobs`` of the sampler (after
    temperature, 0 where not sampled), ``advantages``, the weights of the three loss components (0 means "not in it")
    and ``ref_logprobs``. ``name`` is what an error message calls the sample: ``<subject>#<branch>``.
    """

    name: str
    token_ids: npt.NDArray[np.int64]
    sampled: npt.NDArray[np.bool_]
    logprobs: FloatArray
    advantages: FloatArray
    rl_weights: FloatArray
    ce_weights: FloatArray
    ref_kl_weights: FloatArray
    ref_logprobs: FloatArray
    temperature: float

    def __len__(self) -> int:
        return len(self.token_ids)

    @classmethod
    def supervised(
        cls, name: str, token_ids: Sequence[int], ce_weights: Sequence[float], *, temperature: float = 1.0
    ) -> TrainSample:
        """Cross entropy only: ``ce_weights[i]`` weighs the prediction of ``token_ids[i]`` (0: not trained)."""
        if len(token_ids) != len(ce_weights):
            raise BadSample(f"{name}: {len(token_ids)} tokens but {len(ce_weights)} ce weights")
        zeros = np.zeros(len(token_ids), np.float32)
        return cls(
            name=name, token_ids=np.asarray(token_ids, np.int64), sampled=zeros.astype(bool), logprobs=zeros,
            advantages=zeros, rl_weights=zeros, ce_weights=np.asarray(ce_weights, np.float32),
            ref_kl_weights=zeros, ref_logprobs=zeros, temperature=temperature,
        )

    @classmethod
    def from_wire(cls, sample: Sample, branch: Branch) -> TrainSample:
        """Join a committed sample (resolved arrays) with its branch; raises :class:`BadSample` on anything unsound."""
        name = f"{sample.subject}#{sample.branch}"
        token_ids = branch.token_ids.numpy().astype(np.int64)
        length = len(token_ids)

        def stream(label: str, array: Array | None, default: npt.NDArray[np.float32]) -> FloatArray:
            values = default if array is None else array.numpy().astype(np.float32)
            if values.shape != (length,):
                raise BadSample(f"{name}: {label} has shape {values.shape}, its branch has {length} tokens")
            if not np.isfinite(values).all():
                raise BadSample(f"{name}: {label} of token {int(np.argmin(np.isfinite(values)))} is not finite")
            return values

        zeros = np.zeros(length, np.float32)
        sampled = stream("sampled", branch.sampled, zeros).astype(bool)
        result = cls(
            name=name,
            token_ids=token_ids,
            sampled=sampled,
            logprobs=np.where(sampled, stream("logprobs", branch.logprobs, zeros), np.float32(0)),
            advantages=stream("advantages", sample.advantages, zeros),
            rl_weights=stream("rl_weights", sample.rl_weights, np.ones(length, np.float32)),
            ce_weights=stream("ce_weights", sample.ce_weights, zeros),
            ref_kl_weights=stream("ref_kl_weights", sample.ref_kl_weights, zeros),
            ref_logprobs=stream("ref_logprobs", sample.ref_logprobs, zeros),
            temperature=branch.temperature,
        )
        result._check(has_reference=sample.ref_logprobs is not None)
        return result

    def _check(self, *, has_reference: bool) -> None:
        if len(self) < 1:
            raise BadSample(f"{self.name}: no tokens")
        if self.token_ids.min() < 0:
            raise BadSample(f"{self.name}: negative token id")
        if not self.temperature > 0:
            raise BadSample(f"{self.name}: temperature {self.temperature}; training wants one above 0")
        if self.logprobs.max() > 1e-3:
            raise BadSample(f"{self.name}: logprob of token {int(self.logprobs.argmax())} is above 0")
        if self.ref_kl_weights.any() and not has_reference:
            raise BadSample(f"{self.name}: ref_kl weights without reference logprobs")

    def cut(self, length: int) -> TrainSample:
        """The first ``length`` tokens."""
        if len(self) <= length:
            return self
        arrays = {label: getattr(self, label)[:length] for label in _ARRAYS}
        return TrainSample(name=self.name, temperature=self.temperature, **arrays)


_ARRAYS = (
    "token_ids", "sampled", "logprobs", "advantages", "rl_weights", "ce_weights", "ref_kl_weights", "ref_logprobs",
)
