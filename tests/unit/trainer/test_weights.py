"""Published weights are what `save_pretrained` writes, for every family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from dvp_rl.contract.errors import WeightError
from dvp_rl.engines.transformers import TransformersEngine
from dvp_rl.weights.folder import folder_digest
from dvp_rl.weights.layout import check_layout, optional_tensors, read_layout
from dvp_trainer.config import LoraSection, ModelSection
from dvp_trainer.learn.lora import add_lora, merged
from dvp_trainer.learn.model import load_model
from dvp_trainer.learn.weight_files import unique_tensors, write_adapter, write_weights
from dvp_trainer.learn.world import World
from tests.kit.families import FAMILIES, write_small_model

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")  # gpt_bigcode's own
IDS = torch.arange(2, 26).view(2, 12)


def logits(folder: Path, dtype: torch.dtype) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=IDS, use_cache=False).logits
    return found


def trained(model: Any) -> Any:
    """The model, its trainable weights changed in place."""
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in filter(lambda weight: weight.requires_grad, model.parameters()):
            weight.add_(torch.randn_like(weight), alpha=0.01)
    return model


@pytest.mark.parametrize(("dtype", "tied"), [(torch.float32, False), (torch.bfloat16, True)])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_published_folder_is_a_saved_one(tmp_path: Path, model_type: str, dtype: torch.dtype, tied: bool) -> None:
    source = write_small_model(tmp_path / "model", model_type, tie_word_embeddings=tied)
    model = trained(load_model(ModelSection(path=source)))
    published, saved = tmp_path / "published", tmp_path / "saved"
    published.mkdir()
    write_weights(model, published, dtype, World())
    model.to(dtype).save_pretrained(saved)
    (published / "config.json").write_bytes((saved / "config.json").read_bytes())
    assert load_file(published / "model.safetensors").keys() == load_file(source / "model.safetensors").keys()
    assert (published / "model.safetensors").read_bytes() == (saved / "model.safetensors").read_bytes()
    assert torch.equal(logits(published, dtype), logits(saved, dtype))


def test_a_folder_of_fused_experts_stays_one(tmp_path: Path) -> None:
    """Published names are those that Transformers writes with `save_original_format=False`, which the engine knows."""
    source = write_small_model(tmp_path / "model", "qwen3_moe")
    AutoModelForCausalLM.from_pretrained(source).save_pretrained(tmp_path / "fused", save_original_format=False)
    model = load_model(ModelSection(path=tmp_path / "fused"))
    published = tmp_path / "published"
    published.mkdir()
    write_weights(model, published, torch.float32, World())
    weights = load_file(published / "model.safetensors")
    assert "model.layers.0.mlp.experts.gate_up_proj" in weights
    assert weights.keys() == load_file(tmp_path / "fused" / "model.safetensors").keys()


@pytest.mark.parametrize(
    ("model_type", "name"),
    [("deepseek_v3", "model.layers.2.eh_proj.weight"), ("qwen3_next", "mtp.fc.weight"), ("llama", "")],
)
def test_sglang_accepts_a_published_folder_without_the_layers_that_predict_further(
    tmp_path: Path, model_type: str, name: str
) -> None:
    """SGLang's model may also have multi-token prediction; any other tensor that is missing is refused."""
    source = write_small_model(tmp_path / "model", model_type, num_nextn_predict_layers=1 if name else 0)
    file = source / "model.safetensors"
    save_file(load_file(file) | ({name: torch.zeros(4)} if name else {}), file, metadata={"format": "pt"})
    published = tmp_path / "published"
    published.mkdir()
    write_weights(load_model(ModelSection(path=source)), published, torch.float32, World())
    check_layout(published, read_layout(source), optional_tensors(source))
    weights = load_file(published / "model.safetensors")
    save_file({k: v for k, v in weights.items() if k != "model.norm.weight"}, published / "model.safetensors")
    with pytest.raises(WeightError, match=r"model\.norm\.weight is missing \(1 in all\)"):
        check_layout(published, read_layout(source), optional_tensors(source))


SERVED = ("qwen2_moe", "qwen3_moe", "mixtral", "olmoe", "granitemoe", "glm4_moe", "phimoe", "ernie4_5_moe")
"""Families that the transformers engine serves. It refuses qwen3_next for its recurrent state."""


async def serve(source: Path, published: Path) -> dict[str, torch.Tensor]:
    """Weights held by an engine that was started with `source`, after a swap to `published`."""
    engine = TransformersEngine(source, threads=1, version=f"weights:0:{folder_digest(source)}")
    await engine.start()
    await engine.load(published, "weights:1:aa")
    held = {name: weight.clone() for name, weight in engine._model.state_dict().items()}
    await engine.close()
    return held


@pytest.mark.parametrize("model_type", SERVED)
async def test_an_engine_swaps_to_a_published_folder(tmp_path: Path, model_type: str) -> None:
    source = write_small_model(tmp_path / "model", model_type)
    model = trained(load_model(ModelSection(path=source)))
    published = tmp_path / "published"
    published.mkdir()
    (published / "config.json").write_bytes((source / "config.json").read_bytes())
    write_weights(model, published, torch.float32, World())
    held, wanted = await serve(source, published), model.state_dict()
    assert held.keys() == wanted.keys()
    assert all(torch.equal(held[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("model_type", ["qwen2_moe", "mixtral", "qwen3_moe", "phimoe"])
async def test_adapters_of_a_model_with_experts(tmp_path: Path, model_type: str) -> None:
    """Trainer and replica merge adapters to the same weights."""
    source = write_small_model(tmp_path / "model", model_type)
    model = load_model(ModelSection(path=source))
    add_lora(model, LoraSection(rank=2), seed=0)
    trained(model)
    whole, adapter = tmp_path / "whole", tmp_path / "adapter"
    for folder in (whole, adapter):
        folder.mkdir()
    (whole / "config.json").write_bytes((source / "config.json").read_bytes())
    write_weights(model, whole, torch.float32, World())
    assert load_file(whole / "model.safetensors").keys() == load_file(source / "model.safetensors").keys()
    wanted = {name: make() for name, make in merged(model, unique_tensors(model))}
    held = await serve(source, whole)
    assert all(torch.equal(held[name], weight) for name, weight in wanted.items())
    write_adapter(model, adapter, folder_digest(source), World())
    held = await serve(source, adapter)
    for name, weight in wanted.items():
        torch.testing.assert_close(held[name], weight, rtol=0, atol=1e-6)
