"""The method runs with torch alone: inside SGLang, neither the rest of this project nor jaxtyping is available."""

import subprocess
import sys

from tests.kit.wait import WITHIN_S

PROGRAM = """
import sys
for absent in ("jaxtyping", "pydantic", "msgpack", "transformers", "dvp_rl.contract"):
    sys.modules[absent] = None
import torch
from dvp_rl.dvp import correction, denominators, metrics, objective, policy, pruning, sampler
logits = torch.zeros(2, 5)
draw = sampler.sample(logits, torch.rand(2, dtype=torch.float64), log_min_p=-13.0, temperature=1.0)
policy.constrained_logprobs(logits, draw.token_ids, log_min_p=-13.0, temperature=1.0)
"""


def test_needs_nothing_but_torch() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=WITHIN_S)
