"""`dvp-train export RUN --to FOLDER`: the model of a checkpoint, as a Hugging Face folder or as an adapter."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shlex import quote
from typing import Any

import torch
from pydantic import BaseModel, ValidationError
from transformers import GenerationConfig

from dvp_rl.contract.errors import ConfigError
from dvp_rl.contract.record import describe
from dvp_rl.engines.model_folder import FLOATS
from dvp_rl.engines.tokenizer import Tokenizer, load_config, load_tokenizer
from dvp_rl.weights.folder import CHAT_TEMPLATE, copy_companions, folder_digest

from .config import DataSection, ExportSettings, LoraSection, ModelSection, SamplingSection
from .disk import writing
from .learn.lora import ADAPTER, add_lora
from .learn.model import load_model
from .learn.state import load_weights
from .learn.weight_files import write_adapter, write_weights
from .learn.world import World
from .options import ExportForm
from .programs import program
from .report.sinks import read_metrics
from .report.starts import FILE as STARTS
from .report.starts import Start, flat, over_time, starts_of_run, that_trained
from .resume.checkpoint import Checkpoints, Progress, unreadable

CARD = "README.md"
CARD_SETTINGS = (
    *("data.train", "reward.name", "sampling.n", "sampling.log_min_p", "sampling.temperature", "sampling.max_tokens"),
    *("batch.groups", "batch.updates", "batch.max_staleness", "optimizer.lr", "lora.rank", "correction.mode", "seed"),
)
LOADED = """```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(".")
model = AutoModelForCausalLM.from_pretrained(".", dtype="auto")
```
"""
LOADED_ADAPTER = """```python
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

base = {base!r}  # the folder that training started from
tokenizer = AutoTokenizer.from_pretrained(base)
model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype="auto"), ".")
```
"""
SERVED = """
```sh
{commands}
```

`generation_config.json` samples from the policy that was trained: temperature {temperature:g}, min-p
{min_p:.6g}, nothing else. `generate` and vLLM take it as their default, SGLang only for chat: with its other
endpoints, and to `dvp-rollout`, send both.
"""
ASKED = """
This asks `dvp-rollout`; put a prompt where the dots are:

```sh
{command}
```
"""
CHAT = """
Prompts were rendered by the chat template:

````python
{imports}messages = [{messages}]
tokenizer.apply_chat_template(messages, add_generation_prompt=True{arguments})
````
"""


class Recorded(BaseModel):
    """The settings of a run that decide what its checkpoints hold."""

    model: ModelSection
    lora: LoraSection
    sampling: SamplingSection
    data: DataSection


def export(settings: ExportSettings) -> list[str]:
    """Writes the folder and returns lines that describe it. Raises ConfigError if there is no such run or checkpoint,
    if the folder holds anything, or if the model is not the one that the run started from."""
    starts = starts_of_run(settings.run)
    if settings.to.exists() and not (settings.to.is_dir() and not any(settings.to.iterdir())):
        raise ConfigError(f"to = {str(settings.to)!r} is not an empty folder; name a new one")
    progress, state = open_checkpoint(settings)
    trained = that_trained(starts, progress.step)
    start = trained[-1]
    recorded = read_recorded(settings, start)
    source = settings.model or next(folder_of(each) for each in reversed(starts) if each.model == start.model)
    if settings.form is ExportForm.ADAPTER and not recorded.lora.rank:
        raise ConfigError("form = 'adapter': this run trained the weights themselves (lora.rank 0); export 'merged'")
    digest = check_source(source, start)

    model = load_model(ModelSection(path=source))
    if recorded.lora.rank:
        add_lora(model, recorded.lora, seed=0)
    try:
        load_weights(state, model)
    except Exception as error:  # PyTorch raises many types for a damaged folder
        if not state.exists():
            raise ConfigError(
                f"{state.parent} was replaced by newer checkpoints while it was read; export again"
            ) from None
        raise error if isinstance(error, ConfigError) else unreadable(state.parent, error) from error
    dtype = settings.dtype or dtype_of(source)
    with _finished(settings.to) as partial:
        if settings.form is ExportForm.ADAPTER:
            model.peft_config[ADAPTER].base_model_name_or_path = str(source.absolute())
            write_adapter(model, partial, digest, World())
            if start.chat_template is not None:
                (partial / CHAT_TEMPLATE).write_text(start.chat_template, encoding="utf-8")
        else:
            copy_companions(source, partial, start.chat_template)
            write_weights(model, partial, getattr(torch, dtype), World())
            set_dtype(partial / "config.json", dtype)
            vocab_size = model.get_output_embeddings().weight.shape[0]
            generation_config(load_tokenizer(source), recorded.sampling, vocab_size).save_pretrained(partial)
        card = model_card(settings, trained, recorded, progress, dtype, source)
        (partial / CARD).write_text(card, encoding="utf-8")
    return _described(settings, start, recorded, progress, dtype)


def read_recorded(settings: ExportSettings, start: Start) -> Recorded:
    """The run's settings. Raises ConfigError if another version of this project wrote them."""
    try:
        return Recorded.model_validate(start.settings)
    except ValidationError as error:
        raise ConfigError(describe(f"settings in {settings.run / STARTS}", error)) from None


def folder_of(start: Start) -> Path:
    """The folder of the model that the run started from, where it was at this start."""
    return Path(start.folder, start.settings["model"]["path"])


@contextmanager
def _finished(folder: Path) -> Iterator[Path]:
    """A folder whose content becomes that of `folder` at the end of the block. Raises ConfigError (disk full); then
    nothing is left."""
    folder = folder.resolve()
    there = folder.exists()  # perhaps a mount point, or somebody's working directory: not to be replaced
    partial = folder / ".partial" if there else folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    with writing(f"to = {str(folder)!r}", folder.parent):
        try:
            partial.mkdir(parents=True)
            yield partial
            if there:
                for file in partial.iterdir():
                    file.rename(folder / file.name)
            else:
                partial.rename(folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def open_checkpoint(settings: ExportSettings) -> tuple[Progress, Path]:
    """Progress and state folder of the checkpoint to export. Raises ConfigError if there is none."""
    root = settings.run / "checkpoints"
    found = Checkpoints(root, keep=1, create=False).load(settings.step) if root.is_dir() else None
    if found is None:
        raise ConfigError(f"{settings.run} holds no checkpoint to export yet")
    return found


def check_source(folder: Path, start: Start) -> str:
    """The digest of the model folder. Raises ConfigError unless it is the folder that the run started from."""
    if not folder.is_dir():
        raise ConfigError(f"the run started from {folder}, which is not there; name its place with --model")
    digest = folder_digest(folder)
    if digest != start.model:
        raise ConfigError(
            f"model folder {folder} has digest {digest}, but the run started from a folder of digest {start.model}; "
            "name that one with --model"
        )
    return digest


def dtype_of(folder: Path) -> str:
    """The dtype that config.json names, if weights can be rounded to it, otherwise float32."""
    config = load_config(folder)
    dtype = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None)
    return str(dtype).removeprefix("torch.") if dtype in FLOATS else "float32"


def set_dtype(config_file: Path, dtype: str) -> None:
    """Names the dtype in config.json, also in parts of a model that name their own."""
    config = json.loads(config_file.read_text())
    for part in (config, *(inner for inner in config.values() if isinstance(inner, dict))):
        for key in ("torch_dtype", "dtype"):
            if key in part or (part is config and key == "dtype"):
                part[key] = dtype
    config_file.write_text(json.dumps(config, indent=2) + "\n")


def generation_config(tokenizer: Tokenizer, sampling: SamplingSection, vocab_size: int) -> GenerationConfig:
    """Samples from the policy that was trained."""
    return GenerationConfig(
        do_sample=True,
        temperature=sampling.temperature,
        min_p=math.exp(sampling.log_min_p),
        top_p=1.0,
        top_k=vocab_size,  # all: Transformers writes that as 0, SGLang as -1, and each refuses the other's
        eos_token_id=sorted(tokenizer.eos_ids),
        pad_token_id=tokenizer.pad_id,
    )


def model_card(
    settings: ExportSettings, starts: list[Start], recorded: Recorded, progress: Progress, dtype: str, source: Path
) -> str:
    """README.md of the folder: what the model is, how to load it, what it was trained with by `starts`, in the end as
    `recorded`."""
    adapter, start = settings.form is ExportForm.ADAPTER, starts[-1]
    loaded = LOADED_ADAPTER.format(base=str(source.absolute())) if adapter else LOADED + _served(start, recorded, dtype)
    facts = {
        "Run": f"`{start.run_id}`, step {progress.step}, {progress.samples:,} samples",
        "Held-out score": _score(settings.run, progress.step),
        "Started from": f"`{start.settings['model']['path']}`, digest `{start.model}`",
        "Weights": "LoRA adapter, float32" if adapter else dtype,
        **dict(over_time(starts, _on_the_card)),
        "Code": ", ".join(f"`{commit}`" for commit in start.code.values()) or "unknown",
        "Software": ", ".join(f"{name} {version}" for name, version in start.software.items()),
    }
    rows = "\n".join(f"| {name} | {value} |" for name, value in facts.items())
    return (
        f"---\nlibrary_name: {'peft' if adapter else 'transformers'}\npipeline_tag: text-generation\n"
        f"tags: [reinforcement-learning, dvp-rl]\n---\n\n# {start.run_id}\n\nTrained by reinforcement learning with "
        f"Dynamic Vocabulary Pruning ([arXiv 2512.23087](https://arxiv.org/abs/2512.23087)).\n\n"
        f"{loaded}{_chat(start, recorded.data, settings.form)}\n| | |\n| --- | --- |\n{rows}\n"
    )


def _on_the_card(start: Start) -> Iterator[tuple[str, str]]:
    return ((f"`{name}`", f"`{value}`") for name, value in flat(start.settings) if name in CARD_SETTINGS)


def _served(start: Start, recorded: Recorded, dtype: str) -> str:
    """How the folder is served, and what asks the model."""
    sampling, command = recorded.sampling, request_command(start, recorded)
    served = SERVED.format(
        commands="\n".join(serve_commands(".", dtype, "dvp-rollout")),
        temperature=sampling.temperature,
        min_p=math.exp(sampling.log_min_p),
    )
    return served + ASKED.format(command=command) if command else served


def like_prompts(start: Start, data: DataSection) -> list[dict[str, str]] | None:
    """Messages like those of the run's prompts, with dots for what differs; none if the prompts are plain text, and
    None if an earlier version did not record it."""
    roles = start.roles
    if roles is None:
        if not data.renders:
            return None
        roles = ("user",) if data.system_prompt is None else ("system", "user")
    messages = [{"role": role, "content": "..."} for role in roles]
    if data.system_prompt is not None:
        messages[0]["content"] = data.system_prompt
    return messages


def _chat(start: Start, data: DataSection, form: ExportForm) -> str:
    """How prompts became chats, if they did: a served model must get them likewise."""
    messages = like_prompts(start, data)
    if not messages:
        return ""
    arguments = "".join(f", {name}={value!r}" for name, value in data.chat_template_kwargs.items())
    imports = ""
    if data.chat_template and form is ExportForm.ADAPTER:  # the tokenizer is the first model's
        imports = "from pathlib import Path\n\n"
        arguments += f', chat_template=Path("{CHAT_TEMPLATE}").read_text()'
    text = CHAT.format(imports=imports, messages=", ".join(map(str, messages)), arguments=arguments)
    if data.chat_template_kwargs and form is ExportForm.MERGED:
        body = json.dumps({"chat_template_kwargs": data.chat_template_kwargs}, ensure_ascii=False)
        text += f"\nAll three servers take its arguments in the body of a chat request: `{body[1:-1]}`.\n"
    return text


def _score(run: Path, step: int) -> str:
    scores = (record.get("heldout/score") for record in read_metrics(run / "metrics.jsonl") if record["step"] == step)
    score = next(scores, None)
    return "not measured at this step" if score is None else f"{score:.4f}"


def serve_commands(folder: str, dtype: str, rollout: str) -> tuple[str, ...]:
    """How a replica (the program `rollout`), vLLM and SGLang serve the folder in the dtype it has. Left to themselves,
    vLLM and SGLang lower float32."""
    return (
        f"{rollout} --model {folder} --dtype {dtype} --port 8000",
        f"vllm serve {folder} --dtype {dtype}",
        f"python -m sglang.launch_server --model-path {folder} --dtype {dtype}",
    )


def request_command(start: Start, recorded: Recorded) -> str:
    """A request to a replica that serves the model, for the most likely answer to a prompt; "" if it is not known what
    prompts look like."""
    messages, data, sampling = like_prompts(start, recorded.data), recorded.data, recorded.sampling
    if messages is None:
        return ""
    body: dict[str, Any] = {"messages": messages} if messages else {"prompt": "..."}
    if data.chat_template_kwargs:
        body["chat_template_kwargs"] = data.chat_template_kwargs
    body["sampling"] = {"max_tokens": sampling.max_tokens, "temperature": 0}
    if sampling.stop:
        body["sampling"]["stop"] = sampling.stop
    header = "Content-Type: application/json"
    return f"curl -s http://127.0.0.1:8000/v1/rollouts -H {quote(header)} -d {quote(json.dumps(body))}"


def _described(settings: ExportSettings, start: Start, recorded: Recorded, progress: Progress, dtype: str) -> list[str]:
    to = quote(str(settings.to))
    size = sum(file.stat().st_size for file in settings.to.iterdir()) / 1e6
    what = "adapter in float32" if settings.form is ExportForm.ADAPTER else f"whole model in {dtype}"
    lines = [f"{to}: {what}, {size:,.1f} MB: {start.run_id} at step {progress.step}"]
    if settings.form is ExportForm.MERGED:
        lines += [f"  serve  {command}" for command in serve_commands(to, dtype, program("dvp-rollout"))]
        if request := request_command(start, recorded):
            lines.append(f"  ask    {request}")
    return [*lines, f"  read   {to}/{CARD}: how to load it, what it was trained with"]
