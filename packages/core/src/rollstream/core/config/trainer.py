"""Configuration of the trainer."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator
from pydantic_config import BaseConfig

from rollstream.core.config.common import (
    ComponentConfig,
    ModelConfig,
    MonitorsConfig,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)


class DppoLossConfig(BaseConfig):
    """Policy gradient with a divergence-gated token mask; the default objective."""

    type: Literal["dppo"] = "dppo"
    """Selects this objective."""

    mask_low: PositiveFloat = 0.2
    """Drop a token with A ≤ 0 when its probability fell by more than this against the sampler."""

    mask_high: PositiveFloat = 0.2
    """Drop a token with A > 0 when its probability rose by more than this against the sampler."""

    adv_tau: NonNegativeFloat = 1.0
    """Weight of the advantage term."""

    kl_tau: NonNegativeFloat = 1e-3
    """Weight of the squared log ratio."""


class IpoLossConfig(BaseConfig):
    """Like dppo with one symmetric threshold."""

    type: Literal["ipo"] = "ipo"
    """Selects this objective."""

    eps: PositiveFloat = 0.1
    """Drop a token whose probability moved by more than this."""

    adv_tau: NonNegativeFloat = 1.0
    """Weight of the advantage term."""

    kl_tau: NonNegativeFloat = 1e-3
    """Weight of the squared log ratio."""


class IcepopLossConfig(BaseConfig):
    """Importance-weighted policy gradient; a ratio outside the band counts as zero."""

    type: Literal["icepop"] = "icepop"
    """Selects this objective."""

    ratio_low: PositiveFloat = 0.2
    """Lower end of the band."""

    ratio_high: PositiveFloat = 5.0
    """Upper end of the band."""


LossConfig = Annotated[DppoLossConfig | IpoLossConfig | IcepopLossConfig, Field(discriminator="type")]


class ScheduleConfig(BaseConfig):
    """Learning rate over the steps, as a factor of ``optim.lr``."""

    type: Literal["constant", "linear", "cosine"] = "constant"
    """Shape: constant after warm-up, linear warm-up and decay, or cosine."""

    warmup_steps: NonNegativeInt = 0
    """Steps of linear warm-up."""

    decay_steps: NonNegativeInt = 0
    """Steps of linear decay at the end (type linear)."""

    min_factor: NonNegativeFloat = 0.0
    """Floor as a fraction of the base rate."""


class AdamWConfig(BaseConfig):
    """AdamW."""

    type: Literal["adamw"] = "adamw"
    """Selects this optimiser."""

    lr: PositiveFloat = 1e-6
    """Base learning rate."""

    weight_decay: NonNegativeFloat = 0.01
    """Decoupled weight decay."""

    betas: tuple[float, float] = (0.9, 0.999)
    """Moment decay rates."""

    eps: PositiveFloat = 1e-8
    """Denominator floor."""

    max_norm: PositiveFloat | None = 1.0
    """Clip the global gradient norm to this; none leaves it alone."""


class FilesystemTransportConfig(BaseConfig):
    """Weights as safetensors in the run directory, announced by a notice."""

    type: Literal["filesystem"] = "filesystem"
    """Selects this transport."""

    keep_last: PositiveInt = 3
    """Versions that stay on disk behind the newest; v0 always stays."""


class CkptConfig(BaseConfig):
    """Checkpoints."""

    interval: PositiveInt = 50
    """Steps between checkpoints; the last step always gets one."""

    keep_last: PositiveInt = 2
    """Newest checkpoints that stay; the last good one is never deleted before the next is complete."""

    archive: bool = True
    """Archive the batches that a checkpoint covers under batches/ and purge them from the bus."""


class FakeDataConfig(BaseConfig):
    """Train on made-up batches, without bus or store: benchmarks and cheap tests."""

    batch_size: PositiveInt = 16
    """Samples a step."""

    prompt_tokens: PositiveInt = 8
    """Tokens before the sampled ones."""

    completion_tokens: PositiveInt = 16
    """Sampled tokens a sample."""

    seed: int = 0
    """Seed of the data."""


class TrainerConfig(ComponentConfig):
    """The trainer: turns batch n on v{n-1} into v{n}."""

    model: ModelConfig = ModelConfig()
    """Policy model."""

    max_steps: PositiveInt = 100
    """Steps of the run."""

    seq_len: PositiveInt = 2048
    """Tokens of a packed micro-batch; longer samples are cut."""

    nproc: PositiveInt = 1
    """Ranks on this node (torchrun --nproc-per-node)."""

    threads: PositiveInt | None = None
    """Intra-op threads of a rank; part of what bit-exact replay holds equal. None leaves torch's choice."""

    deterministic: bool | None = None
    """Deterministic kernels; none means yes on CPU, no on GPU."""

    seed: int = 0
    """Seed of torch in every rank."""

    loss: LossConfig = DppoLossConfig()
    """The rl objective."""

    optim: AdamWConfig = AdamWConfig()
    """Optimiser."""

    schedule: ScheduleConfig = ScheduleConfig()
    """Learning-rate schedule."""

    weights: FilesystemTransportConfig = FilesystemTransportConfig()
    """How new weights reach the replicas."""

    ckpt: CkptConfig | None = CkptConfig()
    """Checkpoints; none saves nothing but the archive of the chain at the end."""

    monitors: MonitorsConfig = MonitorsConfig()
    """Where metrics go."""

    fake_data: FakeDataConfig | None = None
    """Made-up data instead of the commit chain."""

    dist_timeout: PositiveFloat = 600.0
    """Seconds until a collective that does not finish ends the rank."""

    @model_validator(mode="after")
    def schedule_fits(self) -> TrainerConfig:
        """Warm-up and decay must fit into the run. Checked once the run's length is known (it may come from above)."""
        needed = self.schedule.warmup_steps + self.schedule.decay_steps
        if "max_steps" in self.model_fields_set and needed > self.max_steps:
            raise ValueError(
                f"schedule.warmup_steps + schedule.decay_steps = {needed} exceed max_steps = {self.max_steps}; "
                "shorten them or raise --max-steps"
            )
        return self
