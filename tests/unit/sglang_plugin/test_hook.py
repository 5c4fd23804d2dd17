"""The hook around a stub sampler: what it passes on, and what it refuses."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dvp_rl.sglang_plugin.plugin import ORIGINAL_LOGPROB, PLAIN, constrain_sampler, refuse_bypasses
from dvp_rl.sglang_plugin.versions import ANY_VERSION, TESTED, refusal


@dataclass
class SamplingInfo:
    """The fields of SGLang's SamplingBatchInfo that the hook reads."""

    min_ps: Tensor
    temperatures: Tensor
    need_min_p_sampling: bool
    has_custom_logit_processor: bool = False


class Sampler:
    """Records its arguments, as the sampler of a server started with --rl-on-policy-target fsdp."""

    rl_on_policy_target: str | None = "fsdp"
    use_log_softmax_logprob = True

    def forward(self, logits_output: Any, sampling_info: SamplingInfo, *args: Any, **kwargs: Any) -> str:
        self.seen = (logits_output, sampling_info, args, kwargs)
        self.rounds = self.rl_on_policy_target is not None or self.use_log_softmax_logprob
        return "token ids"


def make_batch(min_p: float) -> tuple[SimpleNamespace, SamplingInfo]:
    output = SimpleNamespace(next_token_logits=torch.tensor([[0.0, -1.0, -9.0]]), customized_info=None)
    return output, SamplingInfo(torch.tensor([min_p]), torch.ones(1, 1), need_min_p_sampling=min_p > 0)


def test_batch_without_min_p_goes_through_untouched() -> None:
    sampler, (output, info) = Sampler(), make_batch(0.0)
    before = output.next_token_logits.clone()
    assert constrain_sampler(Sampler.forward, sampler, output, info, True, positions=3) == "token ids"
    seen_output, seen_info, args, kwargs = sampler.seen
    assert (seen_output is output, seen_info is info, args, kwargs) == (True, True, (True,), {"positions": 3})
    assert torch.equal(output.next_token_logits, before)
    assert output.customized_info is None
    assert sampler.rounds


def test_min_p_is_done_before_the_sampler_and_only_for_this_call() -> None:
    sampler, (output, info) = Sampler(), make_batch(0.1)
    output.customized_info = {"theirs": [1]}
    assert constrain_sampler(Sampler.forward, sampler, output, info, True, positions=3) == "token ids"
    _, seen_info, args, kwargs = sampler.seen
    assert (seen_info.need_min_p_sampling, args, kwargs) == (False, (True,), {"positions": 3})
    assert info.need_min_p_sampling
    assert not sampler.rounds
    assert (sampler.rl_on_policy_target, sampler.use_log_softmax_logprob) == ("fsdp", True)
    assert output.next_token_logits.tolist() == [[0.0, -1.0, float("-inf")]]
    assert output.customized_info["theirs"] == [1]
    assert output.customized_info["kept_count"][0] == 2
    assert output.customized_info["kept_mass"][0] == pytest.approx(0.99991, abs=1e-5)


def test_untested_version_is_refused_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ANY_VERSION, raising=False)
    assert all(refusal(version) is None and refusal(f"{version}+cu130") is None for version in TESTED)
    reason = refusal("0.4.0")
    assert reason is not None
    assert all(part in reason for part in ("0.4.0", *TESTED, ANY_VERSION))
    monkeypatch.setenv(ANY_VERSION, "1")
    assert refusal("0.4.0") is None


@pytest.mark.parametrize(
    ("used", "value"),
    [
        ("--speculative-algorithm", "EAGLE"),
        ("--dllm-algorithm", "LowConfidence"),
        ("--enable-watermark", True),
        ("--disaggregation-mode", "prefill"),
        ("--pp-size", 2),
        (ORIGINAL_LOGPROB, "true"),
    ],
)
def test_settings_that_bypass_the_hook_are_refused(used: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ORIGINAL_LOGPROB, raising=False)
    arguments = SimpleNamespace(**PLAIN)
    refuse_bypasses(arguments)
    if used == ORIGINAL_LOGPROB:
        monkeypatch.setenv(used, value)
    else:
        setattr(arguments, used.lstrip("-").replace("-", "_"), value)
    with pytest.raises(SystemExit, match=used):
        refuse_bypasses(arguments)
