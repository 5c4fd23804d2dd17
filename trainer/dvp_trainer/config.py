"""Settings of a training run: one TOML file, every key also `DVP_TRAIN__SECTION__KEY` and `--section.key`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, SecretStr, model_validator
from pydantic_settings import SettingsConfigDict

from dvp_rl.contract.job import MAX_GROUP_TOKENS
from dvp_rl.contract.sampling import LOG_RHO, Sampling
from dvp_rl.contract.shape import ShapeText
from dvp_rl.contract.weights import RUN_ID, WeightRoute
from dvp_rl.dvp.denominators import Denominator
from dvp_rl.dvp.options import Baseline, Bounds, Level, Mode
from dvp_rl.http.settings import Listening, WeightReader
from dvp_rl.logs import LogFormat, LogLevel
from dvp_rl.settings import Section, Settings
from dvp_rl.tracing import TraceUrl

from .options import OnError, Overlong

Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0)]
LogMinP = Annotated[float, Field(ge=-1e4, le=0)]


class ModelSection(Section):
    path: Path
    """Folder of a Hugging Face causal LM: where training starts."""
    device: str = "cpu"
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """bfloat16: forward and backward as an engine of that dtype computes; weights, optimizer and sums of gradients stay
    float32. Logits are cast to float32 before the method sees them."""
    fp32_head: bool = False
    """Of bfloat16: the LM head computes in float32 on the same weights. Replicas of it need --fp32-head too: on one
    side only it is worse than on neither, and refused."""
    gradient_checkpointing: bool = False
    micro_batch_tokens: Positive = 16_384
    """Tokens of one forward and backward, every sequence with its prompt; memory grows with this."""
    fixed_shape: ShapeText | None = None
    """ROWSxLENGTH of every forward. With the same in the replicas, everything in float32 and max_staleness 0, the
    log-probs of both sides are equal bit for bit."""


class LoraSection(Section):
    """Trains low-rank adapters instead of the weights."""

    rank: NonNegative = 0
    """0: the weights themselves are trained."""
    alpha: Positive = 32
    """An adapter counts alpha / rank times."""
    targets: tuple[str, ...] = ()
    """Linear layers that get one, by the ends of their names, as q_proj. None: all but the LM head."""
    publish: Literal["merged", "adapter"] = "merged"
    """adapter: a version holds nothing else, and transformers replicas add it to the model they were started with."""


class BrokerSection(Section):
    url: SecretStr = SecretStr("redis://127.0.0.1:6379/0")
    stall_timeout_s: Seconds = 3600.0
    """Without a single group for this long, the run stops with the queue's verdict; it can be resumed. A broker that is
    away is waited for as long, at start, too."""
    lease_s: Annotated[float, Field(ge=0.5, le=3600)] = 15.0
    """How long a trainer that died without a word keeps its successor waiting."""


class DataSection(Section):
    train: str
    """A .jsonl or .parquet file, a folder saved by `datasets`, or `hub:owner/name`."""
    heldout: str | None = None
    train_split: str = "train"
    """Of a data set that has several; likewise below."""
    heldout_split: str = "train"
    subset: str | None = None
    """Configuration name of a data set that has several."""
    prompt_column: str | None = None
    """None: recognised from the layout (plain, DAPO-math, AIME)."""
    answer_column: str | None = None
    shuffle: bool = True
    limit: Positive | None = None
    max_prompt_tokens: Positive | None = None
    """Longer prompts are left out, and counted."""


class RewardSection(Section):
    name: str
    """`math`, `exact_match`, `arithmetic`, or `module:function` found from the working directory."""
    workers: Positive = 1
    timeout_s: Seconds = 10.0
    """For one sample; then it fails."""
    memory_mib: Positive = 2048
    """A worker may take so much more than it has when the function is imported; then the sample fails. Linux only."""
    on_error: OnError = OnError.ZERO
    overlong: Overlong = Overlong.KEEP
    overlong_buffer: NonNegative = 0
    """Tokens before max_tokens in which the soft penalty grows from 0 to -1 (DAPO)."""


class SamplingSection(Section):
    """The policy that is sampled and trained."""

    n: Annotated[int, Field(ge=1, le=1024)] = 8
    log_min_p: LogMinP = LOG_RHO
    """log(rho); -13 by default. A small vocabulary needs a larger rho for pruning to bind at all."""
    temperature: Annotated[float, Field(gt=0, le=100)] = 1.0
    max_tokens: Positive = 1024
    stop: tuple[str, ...] = ()

    def to_sampling(self, seed: int | None = None) -> Sampling:
        return Sampling(seed=seed, **self.model_dump(exclude={"n"}))


class BatchSection(Section):
    groups: Positive = 32
    """Prompts of one batch."""
    updates: Positive = 1
    """Optimizer steps per batch, each on a part of its groups. More than one needs a pass over the batch first."""
    refill: bool = False
    """DAPO's dynamic sampling: groups without signal are replaced by further prompts."""
    refill_limit: Positive = 4
    """At most this many batches' worth of prompts for one batch; then groups without signal fill it."""
    max_staleness: NonNegative = 1
    """Batches that may have changed the weights since a sample was drawn, however many optimizer steps each made. 0 is
    synchronous, and on-policy with one update per batch."""
    on_stale: Literal["drop", "train"] = "drop"
    """drop: the prompt comes back as its next attempt."""
    max_attempts: Positive = 8


class CorrectionSection(Section):
    """What makes the update robust against mismatch; names as in dvp_rl.dvp."""

    veto: Annotated[float, Field(gt=0, lt=1)] | None = 1e-4
    """A sequence with one token whose ratio is below this is dropped. None: only outside and NaN tokens veto."""
    mode: Mode = Mode.MIS
    level: Level = Level.SEQUENCE
    bounds: Bounds = Bounds.UPPER
    cap: Annotated[float, Field(ge=1)] = 2.0
    denominator: Denominator = Denominator.ALL
    baseline: Baseline = Baseline.RLOO


class OptimizerSection(Section):
    lr: Annotated[float, Field(gt=0)] = 1e-6
    betas: tuple[float, float] = (0.9, 0.95)
    eps: Annotated[float, Field(gt=0)] = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    warmup_steps: NonNegative = 0
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0


class CheckpointSection(Section):
    interval: Positive = 10
    """Batches between checkpoints. Groups are acknowledged after the checkpoint that covers them."""
    keep: Positive = 2


class WeightsSection(WeightReader):
    folder: Path | None = None
    """Shared volume that the replicas read. None: out_dir/weights."""
    url: Annotated[str, Field(pattern=r"^https?://[^/]+$")] | None = None
    """Where dvp-weights serves that folder (http://host:port), for replicas that do not see it. A version is announced
    when it is there, which is waited for as long as for the broker."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    keep_last: Positive = 2
    route: WeightRoute = WeightRoute.FOLDER
    """distributed: sends them to SGLang replicas, which need not share the folder then."""
    interface: str = "lo"
    """Network interface on which replicas are met. The network behind it must be a trusted one."""
    send_timeout_s: Seconds = 600.0
    """Longest time for one replica to get a version."""


class EvaluateSection(Section):
    interval: NonNegative = 0
    """Batches between held-out evaluations; 0 is never. The first is before the first step."""
    n: Positive = 1
    """Samples per held-out prompt; avg@n and pass@k for k = 1, 2, 4, .. n."""
    temperature: Annotated[float, Field(ge=0, le=100)] = 1.0
    log_min_p: LogMinP | None = None
    """None: that of the policy in training, likewise below. -1e4 prunes nothing."""
    max_tokens: Positive | None = None
    correct_from: float = 1.0
    """Reward from which on pass@k counts a sample as correct. Any but 1 is part of the metric's name."""
    limit: Positive | None = None
    timeout_s: Seconds = 3600.0

    def to_sampling(self, trained: SamplingSection, seed: int) -> Sampling:
        own = {"temperature": self.temperature, "log_min_p": self.log_min_p, "max_tokens": self.max_tokens}
        changes = {name: value for name, value in own.items() if value is not None}
        return trained.to_sampling(seed).model_copy(update=changes)


class ReportSection(Section):
    tensorboard: bool = True
    wandb_project: str | None = None
    tokens_interval: NonNegative = 0
    """Batches between records of both sides' log-probs of every token (out_dir/tokens, about 30 bytes a token), for
    `dvp-lab signature --run`; 0 is never."""


class MetricsSection(Listening, Section):
    """/metrics for Prometheus, and /healthz."""

    port: Annotated[int, Field(ge=1, le=65535)] | None = None
    """None: nothing is served."""

    @classmethod
    def token_variable(cls) -> str:
        return "DVP_TRAIN__METRICS__TOKEN"


class TrainSettings(Settings):
    """A training run."""

    model_config = SettingsConfigDict(env_prefix="DVP_TRAIN__", cli_prog_name="dvp-train")

    run_id: Annotated[str, Field(pattern=RUN_ID)]
    """Names the queue, the weight versions and the lease: one trainer per run id."""
    out_dir: Path
    steps: Positive
    seed: NonNegative = 0
    deterministic: bool = False
    """Bitwise reproducible with max_staleness 0 and one replica in deterministic mode."""
    threads: NonNegative = 0
    """CPU threads of the trainer; 0: one per CPU that it may use."""
    resume: bool = True
    """Go on from the newest checkpoint in out_dir if there is one."""

    model: ModelSection
    lora: LoraSection = LoraSection()
    broker: BrokerSection = BrokerSection()
    data: DataSection
    reward: RewardSection
    sampling: SamplingSection = SamplingSection()
    batch: BatchSection = BatchSection()
    correction: CorrectionSection = CorrectionSection()
    optimizer: OptimizerSection = OptimizerSection()
    checkpoint: CheckpointSection = CheckpointSection()
    weights: WeightsSection = WeightsSection()
    evaluate: EvaluateSection = EvaluateSection()
    report: ReportSection = ReportSection()
    metrics: MetricsSection = MetricsSection()
    trace_url: TraceUrl | None = None
    """Collector of OpenTelemetry traces, e.g. http://127.0.0.1:4318; needs the extra otel."""
    log_level: LogLevel = LogLevel.INFO
    log_format: LogFormat = LogFormat.TEXT

    @model_validator(mode="after")
    def _consistent(self) -> TrainSettings:
        if self.evaluate.interval and self.data.heldout is None:
            raise ValueError(f"evaluate.interval is {self.evaluate.interval} but data.heldout names no data set")
        lengths = {
            "sampling": self.sampling.max_tokens,
            "evaluate": self.evaluate.max_tokens or self.sampling.max_tokens,
        }
        for section, n in (("sampling", self.sampling.n), ("evaluate", self.evaluate.n)):
            if (num_tokens := n * lengths[section]) > MAX_GROUP_TOKENS:
                raise ValueError(
                    f"{section}.n x {section}.max_tokens is {num_tokens}, at most {MAX_GROUP_TOKENS} allowed in a group"
                )
        if self.batch.updates > self.batch.groups:
            raise ValueError(
                f"batch.updates is {self.batch.updates}, and each needs a group of its own: at most batch.groups = "
                f"{self.batch.groups}"
            )
        if self.lora.publish == "adapter" and not (self.lora.rank and self.weights.route is WeightRoute.FOLDER):
            raise ValueError(
                f"lora.publish = 'adapter' needs lora.rank above 0, got {self.lora.rank}, and weights.route = "
                f"'folder', got {self.weights.route.value!r}"
            )
        if self.deterministic and self.batch.max_staleness:
            raise ValueError(f"deterministic needs batch.max_staleness = 0, got {self.batch.max_staleness}")
        return self

    @property
    def weights_folder(self) -> Path:
        return self.weights.folder or self.out_dir / "weights"


class CheckSettings(Settings):
    """What a run would make of a model, found out without one."""

    model_config = SettingsConfigDict(env_prefix="DVP_CHECK__", cli_prog_name="dvp-train check")

    model: ModelSection
    """Its path may stand first, without a name."""
    sampling: SamplingSection = SamplingSection(n=4, max_tokens=32)
    """What a replica is asked for, and the policy that both sides are compared in."""
    replica: Annotated[str, Field(pattern=r"^https?://[^/]+$")] | None = None
    """http://host:port of one that serves this model: how far its log-probs are from those in training."""
    replica_token: SecretStr = SecretStr("")
    threads: NonNegative = 0
    """CPU threads; 0: one per CPU that it may use."""


class EvalSettings(TrainSettings):
    """Scores one checkpoint of a run; takes the run's own configuration file."""

    checkpoint_at: Literal["best", "last"] | NonNegative = "best"
    """Which one: the best held-out score, the newest, or a step."""
