"""Trainer and engine refuse an incomplete model folder with an error that names the cause."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dvp_rl.contract.errors import ConfigError
from dvp_rl.engines.model_folder import load_model as engine_model
from dvp_rl.engines.tokenizer import load_config
from dvp_trainer.config import ModelSection
from dvp_trainer.learn.model import load_model as trainer_model
from tests.kit.families import small_model, write_small_model

NOBODY = 65534
LOADERS: dict[str, Callable[[Path], Any]] = {
    "trainer": lambda folder: trainer_model(ModelSection(path=folder)),
    "engine": lambda folder: engine_model(folder, dtype=torch.float32, device=torch.device("cpu")),
}


@pytest.fixture(params=LOADERS)
def load(request: pytest.FixtureRequest) -> Callable[[Path], Any]:
    return LOADERS[request.param]


def change(folder: Path, drop: str = "", **add: torch.Tensor) -> None:
    """Removes the tensors whose names contain `drop` from the folder, and adds others."""
    file = folder / "model.safetensors"
    kept = {name: weight for name, weight in load_file(file).items() if not drop or drop not in name}
    save_file(kept | add, file, metadata={"format": "pt"})


def change_config(folder: Path, **settings: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | settings))


@pytest.mark.parametrize(
    ("model_type", "drop", "named"),
    [
        ("llama", "layers.1.mlp", r"model\.layers\.1\.mlp\.down_proj\.weight is missing \(3 in all\)"),
        ("llama", "lm_head", r"lm_head\.weight is missing \(1 in all\)"),
        ("qwen3_moe", "layers.0.mlp.experts", r"model\.layers\.0\.mlp\.experts\.down_proj is missing \(2 in all\)"),
        ("qwen3_moe", "layers.0.mlp.experts.3.", r"layers\.0\.mlp\.experts\.down_proj has shape \[3, .*asks for \[4, "),
        ("qwen3_moe", "layers.0.mlp.experts.3.up_proj", r"cannot be loaded.*conversion"),
    ],
)
def test_weights_that_are_missing(
    tmp_path: Path, load: Callable[[Path], Any], model_type: str, drop: str, named: str
) -> None:
    change(write_small_model(tmp_path, model_type), drop)
    with pytest.raises(ConfigError, match=rf"{tmp_path}.*: .*{named}"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"num_hidden_layers": 1}, r"model\.layers\.1\.input_layernorm\.weight is not in LlamaForCausalLM.*\(9 such"),
        ({"intermediate_size": 64}, r"layers\.0\.mlp\.down_proj\.weight has shape \[32, 48\], .* \[32, 64\] \(6 such"),
    ],
)
def test_weights_of_another_config(
    tmp_path: Path, load: Callable[[Path], Any], config: dict[str, int], named: str
) -> None:
    change_config(write_small_model(tmp_path, "llama"), **config)
    with pytest.raises(ConfigError, match=rf"{tmp_path}.*: .*{named}"):
        load(tmp_path)


@pytest.mark.parametrize("model_type", ["llama", "opt", "gpt2"])
def test_a_tied_head_may_be_absent_or_there(tmp_path: Path, load: Callable[[Path], Any], model_type: str) -> None:
    write_small_model(tmp_path, model_type, tie_word_embeddings=True)
    embedding = small_model(model_type, tie_word_embeddings=True).get_input_embeddings().weight.detach()
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    for _ in range(2):
        model = load(tmp_path)
        assert torch.equal(model.get_output_embeddings().weight, embedding)
        change(tmp_path, **{"lm_head.weight": embedding})


@pytest.mark.parametrize(
    ("model_type", "name"),
    [
        ("deepseek_v3", "model.layers.2.eh_proj.weight"),  # beyond the last layer
        ("deepseek_v3", "model.layers.61.eh_proj.weight"),
        ("glm4_moe", "model.layers.2.self_attn.q_proj.weight"),
        ("glm4_moe", "model.layers.46.shared_head.norm.weight"),
        ("ernie4_5_moe", "model.mtp_block.0.mlp.up_proj.weight"),
        ("llama", "model.layers.0.self_attn.rotary_emb.inv_freq"),
    ],
)
def test_what_a_family_leaves_out_may_be_there(tmp_path: Path, model_type: str, name: str) -> None:
    change(write_small_model(tmp_path, model_type), **{name: torch.zeros(4)})
    if model_type in ("deepseek_v3", "glm4_moe"):
        change_config(tmp_path, num_nextn_predict_layers=1)
    model = trainer_model(ModelSection(path=tmp_path))
    assert name not in model.state_dict()


@pytest.mark.skipif(os.geteuid() != 0, reason="NOT TESTED: only root can become somebody else")
@pytest.mark.parametrize(("mode", "unread"), [(0o755, "model.safetensors"), (0o700, "config.json")])
def test_what_belongs_to_another_user_alone_is_named(mode: int, unread: str) -> None:
    """save_pretrained writes weights for their owner. What safetensors says of them is "No such file"."""
    with TemporaryDirectory() as name:
        folder = write_small_model(Path(name), "llama")
        folder.chmod(mode)
        os.seteuid(NOBODY)
        try:
            with pytest.raises(ConfigError, match=rf"user {NOBODY} may not read .*{unread}.*chmod -R a\+rX"):
                load_config(folder)
        finally:
            os.seteuid(0)
