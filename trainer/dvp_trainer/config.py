"""Settings of a training run, from one TOML file; every key is also `DVP_TRAIN__SECTION__KEY` and `--section.key`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, ValidationInfo, field_validator, model_validator
from pydantic_settings import CliPositionalArg, SettingsConfigDict

from dvp_rl.contract.engine import EngineName
from dvp_rl.contract.job import MAX_GROUP_TOKENS, Metadata
from dvp_rl.contract.sampling import LOG_RHO, Sampling
from dvp_rl.contract.shape import ShapeText
from dvp_rl.contract.weights import RUN_ID, WeightRoute
from dvp_rl.dvp.denominators import Denominator
from dvp_rl.dvp.options import Baseline, Bounds, Level, Mode
from dvp_rl.hooks import choice_or_hook, hook_name
from dvp_rl.http.settings import Listening, WeightReader
from dvp_rl.logs import LogFormat, LogLevel
from dvp_rl.settings import Section, Settings
from dvp_rl.tracing import TraceUrl
from dvp_rl.transport.urls import DEFAULT_URL, RedisUrl

from .options import ExportForm, OnError, Overlong, RewardName

Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0)]
LogMinP = Annotated[float, Field(ge=-1e4, le=0)]
SET_BY_UP = {
    "options": {"config", "dry_run", "host", "port", "port_file", "model", "run_id", "replica_id", "redis_url"},
    "harness_options": {"config", "dry_run", "environment", "trial", "urls"},
}
"""By the section's setting that holds options of another program."""
SHARES: dict[str, set[str]] = {
    EngineName.SGLANG: {"sglang.max_total_tokens", "sglang.mem_fraction_static", "sglang.url"},
    EngineName.VLLM: {"vllm.gpu_memory_utilization", "vllm.url"},
}
"""Options of a replica that leave memory of its GPU to others, by the server that would take most of it."""
LIMITS: dict[str, str] = {
    EngineName.SGLANG: '"sglang.max_total_tokens" = 65536',
    EngineName.VLLM: '"vllm.gpu_memory_utilization" = 0.3',
}
"""Examples of them."""
SECRET = re.compile(r"(^|[._])(token|\w*key)$")
HookName = Annotated[str, AfterValidator(hook_name)]


def _from_text(value: Any) -> Any:
    """Truth values as the environment and the command line spell them: to a template, the text "false" is true."""
    if not isinstance(value, Mapping):
        return value
    words = {"true": True, "false": False}
    return {name: words.get(text.lower(), text) if isinstance(text, str) else text for name, text in value.items()}


def _without_null(value: Any) -> Any:
    """The value itself. Raises ValueError for null, which a TOML file cannot hold."""
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    for item in inner:
        if item is None:
            raise ValueError("null is not allowed: leave the argument out")
        _without_null(item)
    return value


def _unicode(text: str) -> str:
    """The text itself. Raises ValueError for one that is not Unicode, as the command line may have it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"not UTF-8 text ({error.reason} at character {error.start})") from None
    return text


Options = Annotated[dict[str, bool | int | float | str], BeforeValidator(_from_text)]
TemplateArguments = Annotated[Metadata, BeforeValidator(_from_text), AfterValidator(_without_null)]


class ModelSection(Section):
    path: Path
    """Folder of the Hugging Face causal LM that training starts from."""
    device: str = "cpu"
    """Where the model trains: cpu, cuda or cuda:N. Under torchrun, cuda gives each rank its own GPU."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """bfloat16: forward and backward compute as an engine of that dtype does; weights, optimizer and gradient sums stay
    float32. Logits are cast to float32 before the method uses them."""
    fp32_head: bool = False
    """bfloat16 only: the LM head computes in float32 on the same weights. bfloat16 replicas then need --fp32-head too:
    on one side only it is worse than on neither, and their groups are refused."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward: less memory, more time."""
    micro_batch_tokens: Positive = 16_384
    """Tokens per forward and backward, prompts included; memory grows with this."""
    fixed_shape: ShapeText | None = None
    """ROWSxLENGTH of every forward. If the replicas use the same shape, everything is float32 and max_staleness is 0,
    the log-probs of both sides are equal bit for bit."""


class LoraSection(Section):
    """Trains low-rank adapters instead of the weights."""

    rank: NonNegative = 0
    """Rank of the adapters; 0 trains the weights themselves."""
    alpha: Positive = 32
    """Adapters are scaled by alpha / rank."""
    targets: tuple[str, ...] = ()
    """Linear layers that get an adapter, by the ends of their names, e.g. q_proj. Empty: all but the LM head."""
    publish: Literal["merged", "adapter"] = "merged"
    """adapter: a version holds only the adapter; transformers replicas add it to the model they were started with."""


class BrokerSection(Section):
    redis_url: RedisUrl | None = None
    """redis://[user:password@]host:port/0 of the broker, or redis+sentinel://[...@]host:port,host:port/NAME. None:
    redis://127.0.0.1:6379/0, or with `up` a broker that it starts."""
    stall_timeout_s: Seconds = 3600.0
    """Longest wait for a group, in seconds; then the run stops, names the replicas that hold its jobs, and can be
    resumed. Also the longest wait for an unavailable broker, including at start."""
    lease_s: Annotated[float, Field(ge=0.5, le=3600)] = 15.0
    """TTL of the trainer's lease, in seconds: how long a crashed trainer blocks its successor."""

    @property
    def url(self) -> str:
        return self.redis_url or DEFAULT_URL


class DataSection(Section):
    train: str
    """A .jsonl or .parquet file, a folder saved by `datasets`, `hub:owner/name`, or your own rows (module:function)."""
    heldout: str | None = None
    """Prompts that are only evaluated on, in the same forms. Rows are read in their order."""
    train_split: str = "train"
    """Split of `train` to use if the data set has several."""
    heldout_split: str = "train"
    """Split of `heldout` to use if the data set has several."""
    subset: str | None = None
    """Configuration to use if the data set has several."""
    prompt_column: str | None = None
    """None: recognised from the layout (plain, DAPO-math, AIME)."""
    answer_column: str | None = None
    """None: recognised likewise. A dot selects a nested column, e.g. reward_model.ground_truth."""
    as_chat: bool = False
    """Prompts that are plain text become the user's message of a chat, as models with a chat template expect."""
    system_prompt: Annotated[str, AfterValidator(_unicode)] | None = None
    """First message of every prompt, plain text included (`as_chat`). Rows must not have one of their own."""
    chat_template: Path | None = None
    """File with a Jinja template in place of the model's own. Published and exported models carry it."""
    chat_template_kwargs: TemplateArguments = Field(default={})
    """Arguments of the chat template, e.g. { enable_thinking = false }. One that the template does not read is
    refused. The texts "true" and "false" stand for the values, because the environment has only texts."""
    shuffle: bool = True
    """Draw training prompts in a new random order in every epoch."""
    limit: Positive | None = None
    """Train on the first rows only."""
    max_prompt_tokens: Positive | None = None
    """Longer prompts are skipped and counted."""

    @property
    def renders(self) -> bool:
        """Whether any setting decides how prompts are rendered."""
        own = self.chat_template is not None or bool(self.chat_template_kwargs)
        return own or self.as_chat or self.system_prompt is not None


class RewardSection(Section):
    name: Annotated[str, AfterValidator(partial(choice_or_hook, RewardName))]
    """`math`, `exact_match`, `arithmetic`, or `module:function` importable from the working directory, in this
    project's form or TRL's, plain or async. `given`: a harness rewards every episode (episodes.harness); one that was
    cut off without a reward has 0."""
    workers: Positive = 1
    """Processes that compute rewards."""
    timeout_s: Seconds = 10.0
    """Longest time to score one sample, in seconds; then its reward fails. In TRL's form a group has as many times that
    as it has samples."""
    memory_mib: Positive = 2048
    """Memory that a worker may take beyond what it has once the function is imported; then the sample's reward fails.
    Linux only."""
    on_error: OnError = OnError.ZERO
    """zero: a sample whose reward fails has reward 0, and is counted; the run stops only if all of a batch fail. stop:
    the first failure stops the run."""
    overlong: Overlong = Overlong.KEEP
    """Treatment of samples that max_tokens cut off. keep: like all others. soft: DAPO's penalty on every long sample.
    mask: no gradient. drop: no gradient, and no part in the baseline of the others."""
    overlong_buffer: NonNegative = 0
    """Number of tokens before max_tokens over which the soft penalty grows from 0 to -1 (DAPO)."""


class EpisodesSection(Section):
    """Episodes of several turns, played by a harness over HTTP: POST /v1/episodes on any replica."""

    harness: bool = False
    """Each prompt is a task of `sampling.n` episodes, which a harness plays and rewards. Replicas only draw turns."""
    idle_s: Seconds = 120.0
    """Longest time without a turn or heartbeat of an episode, in seconds; then it is given to another harness. Replicas
    send heartbeats while they draw, dvp-harness while its environment is busy. Must be less than
    broker.stall_timeout_s."""


class SamplingSection(Section):
    """The policy that is sampled and trained."""

    n: Annotated[int, Field(ge=1, le=1024)] = 8
    """Samples per prompt."""
    log_min_p: LogMinP = LOG_RHO
    """log(rho); -13 by default. A small vocabulary needs a larger rho for pruning to bind at all."""
    temperature: Annotated[float, Field(gt=0, le=100)] = 1.0
    """Divides the logits before pruning, in sampling and in training."""
    max_tokens: Positive = 1024
    """Longest sample, in tokens."""
    stop: tuple[str, ...] = ()
    """Texts that end a sample. The tokens that complete one are trained, too."""

    def to_sampling(self, seed: int | None = None) -> Sampling:
        return Sampling(seed=seed, **self.model_dump(exclude={"n"}))


class BatchSection(Section):
    groups: Positive = 32
    """Prompts per batch."""
    updates: Positive = 1
    """Optimizer steps per batch, each on a part of its groups. More than one costs an extra forward over the batch."""
    refill: bool = False
    """DAPO's dynamic sampling: groups without signal are replaced by further prompts."""
    refill_limit: Positive = 4
    """Maximum number of prompts tried for one batch, in batches; after that, groups without signal are accepted."""
    max_staleness: NonNegative = 1
    """Batches that may have changed the weights since a sample was drawn, however many optimizer steps each made. 0 is
    synchronous, and on-policy with one update per batch."""
    on_stale: Literal["drop", "train"] = "drop"
    """drop: the prompt is sampled again as its next attempt."""
    max_attempts: Positive = 8
    """Attempts at a prompt, those for stale groups included, after which a group that does not match its job stops the
    run."""


class CorrectionSection(Section):
    """Corrections that make the update robust against mismatch; names as in dvp_rl.dvp."""

    veto: Annotated[float, Field(gt=0, lt=1)] | None = 1e-4
    """A sequence is dropped if the ratio of any token is below this. None: only outside and NaN tokens veto."""
    mode: Mode = Mode.MIS
    """What happens to an importance weight out of bounds. mis: 0. tis: truncated. none: as it is. unit: all are 1."""
    level: Level = Level.SEQUENCE
    """What one weight covers: a sequence, a token, or a sequence by its geometric mean. Only sequence is unbiased."""
    bounds: Bounds = Bounds.UPPER
    """upper: w <= cap. two_sided: 1 / cap <= w <= cap."""
    cap: Annotated[float, Field(ge=1)] = 2.0
    """Largest weight within bounds."""
    denominator: Denominator = Denominator.ALL
    """The step's sum is divided by the number of all sequences, or that times the share that was kept."""
    baseline: Annotated[str, AfterValidator(partial(choice_or_hook, Baseline))] = Baseline.RLOO
    """`rloo`, `rloo_weighted`, `grpo`, `grpo_std`, or your own advantages as module:function."""
    objective: HookName | None = None
    """Your own loss to minimise, as module:function. None: the estimator of Theorem 5.3."""


class OptimizerSection(Section):
    lr: Annotated[float, Field(gt=0)] = 1e-6
    """Learning rate of AdamW, constant after the warm-up."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of AdamW's two moments."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the square root of AdamW's second moment."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """AdamW's decoupled weight decay."""
    warmup_steps: NonNegative = 0
    """Optimizer steps over which the learning rate grows linearly."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """Gradients of a larger norm are scaled down to it."""


class CheckpointSection(Section):
    interval: Positive = 10
    """Batches between checkpoints. Groups are acknowledged after the checkpoint that covers them."""
    keep: Positive = 2
    """Newest checkpoints to keep, besides the one with the best held-out score."""


class WeightsSection(WeightReader):
    folder: Path | None = None
    """Shared volume that the replicas read. None: out_dir/weights."""
    url: Annotated[str, Field(pattern=r"^https?://[^/]+$")] | None = None
    """URL of the dvp-weights that serves this folder (http://host:port), for replicas that do not mount it. A version
    is announced once it is served there; the longest wait is broker.stall_timeout_s."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of published weights."""
    keep_last: Positive = 2
    """Newest versions to keep on disk, besides those that are served or belong to a checkpoint."""
    route: WeightRoute = WeightRoute.FOLDER
    """distributed: sends weights over the network to SGLang replicas, which then need not share the folder."""
    interface: str = "lo"
    """Network interface for sending weights to replicas. Its network must be trusted."""
    send_timeout_s: Seconds = 600.0
    """Longest time to send a version to one replica, in seconds."""
    canary: bool = True
    """Publish with each version what its weights draw, by which replicas check that they serve these weights."""


class EvaluateSection(Section):
    interval: NonNegative = 0
    """Batches between held-out evaluations; 0: never. The first evaluation precedes the first step."""
    n: Positive = 1
    """Samples per held-out prompt; avg@n and pass@k for k = 1, 2, 4, .. n."""
    temperature: Annotated[float, Field(ge=0, le=100)] = 1.0
    """0 is greedy."""
    log_min_p: LogMinP | None = None
    """None: that of the policy in training. -1e4 prunes nothing."""
    max_tokens: Positive | None = None
    """None: that of the policy in training."""
    correct_from: float = 1.0
    """Lowest reward of a sample that pass@k counts as correct. Any value but 1 is part of the metric's name."""
    limit: Positive | None = None
    """Evaluate on the first held-out rows only."""
    timeout_s: Seconds = 3600.0
    """Longest time for one evaluation, in seconds."""

    def to_sampling(self, trained: SamplingSection, seed: int) -> Sampling:
        own = {"temperature": self.temperature, "log_min_p": self.log_min_p, "max_tokens": self.max_tokens}
        changes = {name: value for name, value in own.items() if value is not None}
        return trained.to_sampling(seed).model_copy(update=changes)


class ReportSection(Section):
    tensorboard: bool = True
    """Write metrics to out_dir/tensorboard."""
    html: bool = True
    """Write out_dir/report.html when the run ends, however it ends. `dvp-train report OUT_DIR` does so at any time."""
    wandb_project: str | None = None
    """Project in Weights & Biases; needs wandb."""
    trackio_project: str | None = None
    """Project in Trackio, a tracker that needs no account; needs trackio."""
    sinks: tuple[HookName, ...] = ()
    """Your own metric sinks, as module:function."""
    completions_interval: NonNegative = 10
    """Batches between records of completions with reward, advantage and kept mass: in out_dir/completions.jsonl, on a
    terminal, in W&B and in the report. 0: never. The first batch is shown, too."""
    completions: Positive = 8
    """Completions per record: the best and the worst of a prompt."""
    tokens_interval: NonNegative = 0
    """Batches between records of both sides' log-probs of every token (out_dir/tokens, about 30 bytes a token), for
    `dvp-lab signature --run`; 0: never."""


class UpSection(Section):
    """Only for `dvp-train up`: what it starts on this machine beside the trainer."""

    replicas: Annotated[int, Field(ge=1, le=64)] = 1
    """Number of rollout replicas."""
    engine: Annotated[str, AfterValidator(partial(choice_or_hook, EngineName))] = EngineName.TRANSFORMERS
    """What generates: `transformers`, an `sglang` or `vllm` server per replica, or your own as module:function."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Number format in which they compute. None: model.compute_dtype."""
    gpus: tuple[str, ...] = ()
    """For each replica in turn its CUDA_VISIBLE_DEVICES, e.g. ["1", "2"], or ["1,2"]. Empty: model.device."""
    options: Options = Field(default={})
    """More options of dvp-rollout, e.g. { max_batch = 256 }. Secrets belong in its environment (DVP_ROLLOUT__...)."""
    environment: HookName | None = None
    """Your class, as module:Environment, in which dvp-harness plays the episodes (episodes.harness). None: another
    harness does."""
    harness_options: Options = Field(default={})
    """More options of dvp-harness, e.g. { workers = 32 }. Secrets belong in its environment (DVP_HARNESS__...)."""
    monitor_port: Annotated[int, Field(ge=0, le=65535)] | None = 0
    """Port of the monitor on 127.0.0.1; 0 takes a free one. None: no monitor."""
    show_completions: bool = False
    """Whether the monitor shows completions: every user of this machine can then read them, with their prompts."""

    @model_validator(mode="after")
    def _shown_by_the_monitor(self) -> Self:
        if self.show_completions and self.monitor_port is None:
            raise ValueError("show_completions needs the monitor: set monitor_port")
        return self

    @model_validator(mode="after")
    def _for_the_harness(self) -> Self:
        if self.harness_options and self.environment is None:
            raise ValueError("harness_options are for dvp-harness, which only plays in an environment: set that, too")
        return self

    @field_validator("options", "harness_options")
    @classmethod
    def _not_ours(cls, options: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        plain = {name.replace("-", "_"): value for name, value in options.items()}
        if own := plain.keys() & SET_BY_UP[str(info.field_name)]:
            raise ValueError(f"`dvp-train up` sets {', '.join(sorted(own))} itself")
        for name in plain:
            if SECRET.search(name):
                program = "ROLLOUT" if info.field_name == "options" else "HARNESS"
                variable = f"DVP_{program}__{name.upper().replace('.', '__')}"
                raise ValueError(f"{name} is a secret, which would be written down; give it as {variable}")
        return plain


class MetricsSection(Listening, Section):
    """/metrics for Prometheus, and /healthz."""

    port: Annotated[int, Field(ge=0, le=65535)] | None = None
    """0 takes a free port: see the log. None: nothing is served."""

    @classmethod
    def token_variable(cls) -> str:
        return "DVP_TRAIN__METRICS__TOKEN"


USAGE = """CONFIG [options]
       dvp-train up CONFIG [options]
       dvp-train doctor CONFIG [options]
       dvp-train [up] eval CONFIG [--step STEP] [options]
       dvp-train check MODEL [options]
       dvp-train export RUN --to FOLDER [options]
       dvp-train report RUN
       dvp-train compare RUN RUN ... [--to PAGE]"""


class TrainSettings(Settings):
    """Trains by CONFIG: a TOML file, or the out_dir of a run, which starts again with its settings. up also starts what
    a run needs beside the trainer, on this machine: a broker, replicas, a monitor. doctor says what would stop the run
    and shows its first prompts, eval scores a checkpoint, check tries a model, export writes one, report and compare
    describe runs. Each command explains its own options with --help."""

    model_config = SettingsConfigDict(env_prefix="DVP_TRAIN__", cli_prog_name="dvp-train")
    usage: ClassVar[str] = USAGE
    prose: ClassVar[frozenset[str]] = frozenset({"data.system_prompt", "data.chat_template_kwargs"})
    hint: ClassVar[str] = (
        "nothing to do: name a configuration file, as in `dvp-train CONFIG.toml`. The README shows one (Train your own "
        "model); `dvp-train --help` explains every setting"
    )

    run_id: Annotated[str, Field(pattern=RUN_ID)]
    """Name of the queue, the weight versions and the lease. Each run id admits one trainer."""
    out_dir: Path
    """Folder of the run: checkpoints, weights, metrics and report. A run in it is resumed."""
    steps: Positive
    """Batches to train in all, those before a resume included."""
    seed: NonNegative = 0
    """Seed of the prompts' order, of all samples and of new adapters."""
    deterministic: bool = False
    """Makes the run bitwise reproducible, with max_staleness 0 and one replica in deterministic mode."""
    threads: NonNegative = 0
    """CPU threads of the trainer; 0: one per CPU that it may use."""
    resume: bool = True
    """Resume from the newest checkpoint in out_dir if there is one."""

    model: ModelSection
    lora: LoraSection = LoraSection()
    broker: BrokerSection = BrokerSection()
    data: DataSection
    reward: RewardSection
    episodes: EpisodesSection = EpisodesSection()
    sampling: SamplingSection = SamplingSection()
    batch: BatchSection = BatchSection()
    correction: CorrectionSection = CorrectionSection()
    optimizer: OptimizerSection = OptimizerSection()
    checkpoint: CheckpointSection = CheckpointSection()
    weights: WeightsSection = WeightsSection()
    evaluate: EvaluateSection = EvaluateSection()
    report: ReportSection = ReportSection()
    metrics: MetricsSection = MetricsSection()
    up: UpSection = UpSection()
    trace_url: TraceUrl | None = None
    """Collector of OpenTelemetry traces, e.g. http://127.0.0.1:4318; needs the extra otel."""
    log_level: LogLevel = LogLevel.INFO
    """Least severe messages to log."""
    log_format: LogFormat = LogFormat.TEXT
    """Log lines for people, or as JSON objects."""

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
        if self.deterministic and self.up.replicas > 1:
            raise ValueError(f"deterministic needs up.replicas = 1, got {self.up.replicas}")
        if self.episodes.harness and self.data.chat_template is not None:
            raise ValueError(
                "data.chat_template: the replicas render the turns of episodes, with the template in their model's "
                "folder. Put yours there, or set episodes.harness to false"
            )
        if self.episodes.harness and self.episodes.idle_s >= self.broker.stall_timeout_s:
            raise ValueError(
                f"episodes.idle_s is {self.episodes.idle_s:g}, but must be less than broker.stall_timeout_s = "
                f"{self.broker.stall_timeout_s:g}: a harness that dies holds its episodes that long, and the run "
                "would stop"
            )
        if self.reward.name == RewardName.GIVEN and not self.episodes.harness:
            raise ValueError("reward.name is 'given', but nobody gives rewards: episodes.harness is false")
        if self.up.environment is not None and not self.episodes.harness:
            raise ValueError("up.environment plays episodes, but there are none: episodes.harness is false")
        self._check_gpus_of_servers()
        if self.batch.updates > self.batch.groups:
            raise ValueError(
                f"batch.updates is {self.batch.updates}, but each needs at least one group: at most batch.groups = "
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

    def _check_gpus_of_servers(self) -> None:
        """Raises ValueError if servers of `up` leave no memory on a GPU that they share, or would receive weights over
        NCCL on the trainer's."""
        up = self.up
        if up.engine not in SHARES:
            return
        with_trainer = not up.gpus and self.model.device != "cpu"
        with_each_other = 0 < len(up.gpus) < up.replicas
        if (with_trainer or with_each_other) and not up.options.keys() & SHARES[up.engine]:
            raise ValueError(
                f"up.engine = '{up.engine}': by default a server takes most of its GPU's memory, but here it shares "
                "the GPU with the trainer or another replica: give each its own (up.gpus), or limit its KV cache, "
                f"e.g. up.options = {{ {LIMITS[up.engine]} }}"
            )
        if up.engine == EngineName.SGLANG and with_trainer and self.weights.route is WeightRoute.DISTRIBUTED:
            raise ValueError(
                "weights.route = 'distributed': NCCL refuses two processes on one GPU, here the trainer and a replica: "
                "give each replica its own (up.gpus), or keep weights.route = 'folder'"
            )

    @property
    def weights_folder(self) -> Path:
        return self.weights.folder or self.out_dir / "weights"


class CheckSettings(Settings):
    """Reports how a run would treat a model, without starting one."""

    model_config = SettingsConfigDict(env_prefix="DVP_CHECK__", cli_prog_name="dvp-train check")
    usage: ClassVar[str] = "MODEL [options]"

    model: ModelSection
    """Its path may come first, without an option name."""
    sampling: SamplingSection = SamplingSection(n=4, max_tokens=32)
    """The samples to request from the replica, and the policy under which both sides are compared."""
    replica: Annotated[str, Field(pattern=r"^https?://[^/]+$")] | None = None
    """http://host:port of a replica that serves this model; its log-probs are compared with the trainer's."""
    replica_token: SecretStr = SecretStr("")
    """That replica's token, of scope client."""
    threads: NonNegative = 0
    """CPU threads; 0: one per CPU that it may use."""


Which = Literal["best", "last"] | NonNegative


class EvalSettings(TrainSettings):
    """Scores one checkpoint of a run on its held-out prompts."""

    usage: ClassVar[str] = "[up] eval CONFIG [--step STEP] [options]"

    step: Which = "best"
    """The checkpoint: that with the best held-out score (the newest if there are no scores), the newest, or that of a
    step."""


class ExportSettings(Settings):
    """Writes the model of one checkpoint as a folder for Transformers, SGLang, vLLM and others."""

    model_config = SettingsConfigDict(env_prefix="DVP_EXPORT__", cli_prog_name="dvp-train export")
    usage: ClassVar[str] = "RUN --to FOLDER [options]"

    run: CliPositionalArg[Path]
    """out_dir of the run."""
    to: Path
    """Folder to write: a new or an empty one."""
    step: Which = "best"
    """The checkpoint: that with the best held-out score (the newest if there are no scores), the newest, or that of a
    step."""
    form: ExportForm = ExportForm.MERGED
    """merged: a whole model. adapter: the adapters of a LoRA run alone, for PEFT."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Of a merged model's weights. None: that of the model that training started from."""
    model: Path | None = None
    """Where the model that training started from lies now. None: the run's model.path."""


class ReportSettings(Settings):
    """Writes the HTML report of a run, in progress or ended, and prints how the run stands."""

    model_config = SettingsConfigDict(env_prefix="DVP_REPORT__", cli_prog_name="dvp-train report")
    usage: ClassVar[str] = "RUN"

    run: CliPositionalArg[Path]
    """out_dir of the run."""


class CompareSettings(Settings):
    """Compares runs: the settings in which they differ, what they reached, and their curves in one HTML page."""

    model_config = SettingsConfigDict(env_prefix="DVP_COMPARE__", cli_prog_name="dvp-train compare")
    usage: ClassVar[str] = "RUN RUN ... [--to PAGE]"

    runs: CliPositionalArg[Annotated[tuple[Path, ...], Field(min_length=2, max_length=6)]]
    """out_dirs of the runs, one per colour."""
    to: Path = Path("compare.html")
    """The page to write."""
