"""A model folder gives the trainer the policy that an engine samples from, or an error that names the model type."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from dvp_rl.contract.errors import ConfigError
from dvp_trainer.config import LoraSection, ModelSection
from dvp_trainer.learn.arrangement import Beside
from dvp_trainer.learn.lora import add_lora
from dvp_trainer.learn.model import Policy, load_model
from tests.kit.families import write_small_model

NOISY = {
    "seed_oss": {"attention_dropout": 0.1, "residual_dropout": 0.1},
    "opt": {"dropout": 0.1, "attention_dropout": 0.1, "layerdrop": 0.5},
    "gpt_bigcode": {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1},
    "xglm": {"dropout": 0.1, "attention_dropout": 0.1, "activation_dropout": 0.1, "layerdrop": 0.5},
    "biogpt": {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1, "layerdrop": 0.5},
    "mixtral": {"router_jitter_noise": 0.1, "attention_dropout": 0.1},
    "phimoe": {"router_jitter_noise": 0.1, "input_jitter_noise": 0.1},
    "qwen3": {"attention_dropout": 0.1},
    "granite": {"attention_dropout": 0.1},
    "gpt2": {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1},
}
"""Dropout and noise settings of each family."""
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")  # gpt_bigcode's own
IDS = torch.arange(2, 26).view(2, 12)


def logits(model: PreTrainedModel) -> Tensor:
    found: Tensor = model(input_ids=IDS, use_cache=False).logits
    return found


def gradients(model: PreTrainedModel) -> dict[str, Tensor]:
    model.zero_grad()
    logits(model).logsumexp(-1).sum().backward()
    return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("model_type", NOISY)
def test_the_policy_in_training_is_the_one_that_is_sampled_from(
    tmp_path: Path, model_type: str, checkpointing: bool
) -> None:
    write_small_model(tmp_path, model_type, **NOISY[model_type])
    model = load_model(ModelSection(path=tmp_path, gradient_checkpointing=checkpointing))
    with torch.no_grad():
        sampled = logits(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32))
    assert torch.equal(logits(model), sampled)
    assert torch.equal(logits(model), sampled)


@pytest.mark.parametrize("model_type", NOISY)
def test_layers_that_are_computed_again_have_the_same_gradients(tmp_path: Path, model_type: str) -> None:
    write_small_model(tmp_path, model_type, **NOISY[model_type])
    plain, again = (load_model(ModelSection(path=tmp_path, gradient_checkpointing=flag)) for flag in (False, True))
    forwards = []
    for model in (plain, again):
        attention = next(module for name, module in model.named_modules() if name.endswith(("attn", "attention")))
        attention.register_forward_hook(lambda *_: forwards.append(1))
    expected, num_plain = gradients(plain), len(forwards)
    found = gradients(again)
    assert (num_plain, len(forwards) - num_plain) == (1, 2)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert any(bool(gradient.any()) for gradient in expected.values())


@pytest.mark.parametrize("model_type", ["qwen3", "granite"])
def test_dropout_of_attention_costs_neither_packing_nor_the_sparse_head(tmp_path: Path, model_type: str) -> None:
    write_small_model(tmp_path, model_type, attention_dropout=0.1)
    policy = Policy(load_model(ModelSection(path=tmp_path)), "float32", log_min_p=-13.0, temperature=1.0)
    assert policy.arrangement.beside is Beside.PACKED
    assert policy._has_linear_head


def test_a_policy_with_adapters_draws_nothing_either(tmp_path: Path) -> None:
    model = load_model(ModelSection(path=write_small_model(tmp_path, "opt", **NOISY["opt"])))
    add_lora(model, LoraSection(rank=2), seed=0)
    policy = Policy(model.train(), "float32", log_min_p=-13.0, temperature=1.0)
    policy.model.set_attn_implementation("sdpa")  # sdpa needs no layout
    assert torch.equal(logits(policy.model), logits(policy.model))


class NoisyConfig(LlamaConfig):
    model_type = "noisy_llama"


class NoisyForCausalLM(LlamaForCausalLM):
    """A model that adds noise even in evaluation mode."""

    config_class = NoisyConfig

    def forward(self, *args: Any, **kwargs: Any) -> CausalLMOutputWithPast:
        out = super().forward(*args, **kwargs)
        out.logits = out.logits + 0.1 * torch.randn_like(out.logits)
        return out


def test_a_model_that_is_random_nonetheless_is_refused(tmp_path: Path) -> None:
    AutoConfig.register("noisy_llama", NoisyConfig, exist_ok=True)
    AutoModelForCausalLM.register(NoisyConfig, NoisyForCausalLM, exist_ok=True)
    write_small_model(tmp_path, "llama")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "noisy_llama"}))
    with pytest.raises(ConfigError, match=r"model type noisy_llama.*by up to 0\.\d+.*random"):
        load_model(ModelSection(path=tmp_path))


def test_a_model_whose_layers_are_not_known_cannot_compute_them_again(tmp_path: Path) -> None:
    write_small_model(tmp_path, "openai-gpt")
    load_model(ModelSection(path=tmp_path))
    with pytest.raises(ConfigError, match=r"gradient_checkpointing.*openai-gpt"):
        load_model(ModelSection(path=tmp_path, gradient_checkpointing=True))
