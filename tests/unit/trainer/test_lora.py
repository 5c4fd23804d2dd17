"""Low-rank adapters: what is trained and published, what a checkpoint holds, and which checkpoints are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from dvp_rl.contract.errors import ConfigError, WeightError
from dvp_rl.engines.sglang import SglangEngine
from dvp_rl.engines.sglang_server import Remote
from dvp_rl.engines.transformers import TransformersEngine
from dvp_rl.weights.folder import folder_digest
from dvp_trainer.config import TrainSettings
from dvp_trainer.data.batch import Batch
from dvp_trainer.learn.model import Policy, load_model
from dvp_trainer.learn.step import Learner
from tests.kit.models import make_model
from tests.unit.trainer.golden import make_batch

MakeLearner = Callable[..., Learner]
RANK, ALPHA = 4, 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_model(tmp_path_factory.mktemp("model"), spread=2.0, tied=True)


@pytest.fixture
def make_learner(folder: Path, tmp_path: Path) -> MakeLearner:
    def make(
        rank: int = RANK, alpha: int = ALPHA, targets: tuple[str, ...] = (), publish: str = "merged", **model: Any
    ) -> Learner:
        settings = TrainSettings.model_validate(
            {
                "run_id": "lora",
                "out_dir": tmp_path,
                "steps": 1,
                "model": {"path": folder, **model},
                "lora": {"rank": rank, "alpha": alpha, "targets": targets, "publish": publish},
                "data": {"train": "unused.jsonl"},
                "reward": {"name": "exact_match"},
                "sampling": {"n": 4},
                "correction": {"veto": None, "mode": "unit"},
                "optimizer": {"lr": 0.01, "max_grad_norm": 1e9},
            }
        )
        return Learner(load_model(settings.model), settings, pad_id=0)

    return make


def batches(count: int) -> list[Batch]:
    rng = np.random.default_rng(0)
    return [make_batch(rng) for _ in range(count)]


def published(learner: Learner, folder: Path) -> dict[str, torch.Tensor]:
    folder.mkdir()
    learner.write_weights(folder)
    weights: dict[str, torch.Tensor] = load_file(folder / "model.safetensors")
    return weights


def test_adapters_get_the_gradient_of_the_weights_they_stand_for(make_learner: MakeLearner) -> None:
    """W' = W + s B A with B = 0 gives dB = s dW A^T and dA = 0."""
    whole, low, (batch,) = make_learner(rank=0), make_learner(), batches(1)
    drawn = make_learner().model  # has A as it was before the step
    for learner in (whole, low):
        assert learner.step(batch)["optimizer/updates"] == 1
    found = 0
    for name, weight in whole.model.named_parameters():
        layer = name.removesuffix(".weight")
        if "_proj" not in layer:
            continue
        module, scale = low.model.get_submodule(layer), ALPHA / RANK
        A, B = drawn.get_submodule(layer).lora_A["default"].weight, module.lora_B["default"].weight
        expected = scale * weight.grad @ A.detach().T
        torch.testing.assert_close(B.grad, expected, rtol=1e-3, atol=1e-5 * float(expected.abs().max()))
        assert float(module.lora_A["default"].weight.grad.abs().max()) == 0
        found += 1
    assert found == 2 * 7


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_published_weights_are_the_policy_with_adapters_merged(
    make_learner: MakeLearner, folder: Path, tmp_path: Path, dtype: str
) -> None:
    learner, start = make_learner(compute_dtype=dtype), load_file(folder / "model.safetensors")
    for batch in batches(2):
        assert learner.step(batch)["optimizer/updates"] == 1
    weights = published(learner, tmp_path / "weights")
    assert weights.keys() == start.keys()
    moved = {name for name in start if not torch.equal(weights[name], start[name])}
    assert moved == {name for name in start if "_proj" in name}
    (tmp_path / "weights" / "config.json").write_bytes((folder / "config.json").read_bytes())
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "weights", dtype=torch.float32)
    policy = Policy(model, dtype, log_min_p=-13.0, temperature=1.0)
    micro, *_ = learner._micro_batches(batches(1)[0].episodes())
    with torch.no_grad():
        gap = (policy.read(micro).logprobs - learner.policy.read(micro).logprobs).abs().mean()
        far = (policy.read(micro).logprobs - make_learner(rank=0).policy.read(micro).logprobs).abs().mean()
    assert float(gap) < (1e-4 if dtype == "float32" else 0.05)
    assert float(far) > 0.2


def test_named_layers_alone_get_an_adapter(make_learner: MakeLearner, folder: Path, tmp_path: Path) -> None:
    learner, start = make_learner(targets=("q_proj", "v_proj")), load_file(folder / "model.safetensors")
    learner.step(batches(1)[0])
    weights = published(learner, tmp_path / "weights")
    moved = {name for name in start if not torch.equal(weights[name], start[name])}
    assert moved == {name for name in start if "q_proj" in name or "v_proj" in name}


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens", "nothing_proj"])
def test_what_cannot_have_an_adapter_is_refused(make_learner: MakeLearner, target: str) -> None:
    with pytest.raises(ConfigError, match=rf"lora.targets \['{target}'"):
        make_learner(targets=(target,))


def test_a_restored_learner_goes_on_bit_for_bit_from_adapters_alone(make_learner: MakeLearner, tmp_path: Path) -> None:
    straight, (first, second) = make_learner(gradient_checkpointing=True), batches(2)
    straight.step(first)
    straight.save(tmp_path / "state")
    whole = make_learner(rank=0)
    whole.step(first)
    whole.save(tmp_path / "whole")
    size, of_whole = (sum(f.stat().st_size for f in (tmp_path / name).iterdir()) for name in ("state", "whole"))
    assert size < of_whole / 2
    resumed = make_learner(gradient_checkpointing=True)
    resumed.load(tmp_path / "state")
    for learner in (straight, resumed):
        learner.step(second)
    pairs = zip(straight.model.parameters(), resumed.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"rank": 8}, r"is \(4, 128\) there, \(8, 128\) here \(28 tensors differ\).*lora.rank"),
        ({"rank": 0}, r"not trained there.*lora.rank"),
        ({"targets": ("q_proj",)}, r"not trained here \(24 tensors differ\).*lora.targets"),
        ({"alpha": 24}, r"adapters are scaled by 3 there, by 6 here: lora.alpha"),
    ],
)
def test_a_checkpoint_of_other_adapters_is_refused(
    make_learner: MakeLearner, tmp_path: Path, change: dict[str, Any], named: str
) -> None:
    learner = make_learner()
    learner.step(batches(1)[0])
    learner.save(tmp_path / "state")
    with pytest.raises(ConfigError, match=named):
        make_learner(**change).load(tmp_path / "state")


async def test_a_replica_adds_a_published_adapter_to_its_own_model(
    make_learner: MakeLearner, folder: Path, tmp_path: Path
) -> None:
    learner, merging = (make_learner(publish=publish) for publish in ("adapter", "merged"))
    for each in (learner, merging):
        each.step(batches(1)[0])
    adapter, weights = tmp_path / "adapter", published(merging, tmp_path / "merged")
    adapter.mkdir()
    learner.write_weights(adapter)
    assert sum(f.stat().st_size for f in adapter.iterdir()) < (tmp_path / "merged/model.safetensors").stat().st_size / 2
    engine = TransformersEngine(folder, threads=1, version=f"lora:0:{folder_digest(folder)}")
    await engine.start()
    await engine.load(adapter, "lora:1:aa")
    for name, weight in weights.items():
        torch.testing.assert_close(engine._model.state_dict()[name], weight, rtol=0, atol=1e-6)
    await engine.close()


def test_peft_reads_a_published_adapter(make_learner: MakeLearner, folder: Path, tmp_path: Path) -> None:
    learner = make_learner(publish="adapter", targets=("q_proj", "down_proj"))
    learner.step(batches(1)[0])
    learner.write_weights(tmp_path)
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), tmp_path)
    learner.model.set_attn_implementation("sdpa")
    ids = torch.arange(5, 15)[None]
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids=ids).logits, learner.model(input_ids=ids).logits)


async def test_an_adapter_of_another_model_and_an_engine_that_merges_none_are_refused(
    make_learner: MakeLearner, folder: Path, tmp_path: Path
) -> None:
    make_learner(publish="adapter").write_weights(tmp_path)
    engine = TransformersEngine(folder, threads=1, version="lora:0:aa")
    await engine.start()
    with pytest.raises(WeightError, match=r"the adapter belongs to model .*, but this replica was started with aa"):
        await engine.load(tmp_path, "lora:1:aa")
    await engine.close()
    with pytest.raises(WeightError, match=r"set lora\.publish = 'merged'"):
        await SglangEngine(folder, Remote("http://127.0.0.1:1")).load(tmp_path, "lora:1:aa")


def test_an_adapter_is_published_only_where_replicas_read_it(make_learner: MakeLearner) -> None:
    with pytest.raises(ValueError, match=r"lora.publish = 'adapter' needs lora.rank above 0, got 0"):
        make_learner(rank=0, publish="adapter")
