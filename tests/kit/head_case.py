"""Random inputs of the LM head, and the plain implementation: all logits first. Needs neither pytest nor a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.functional import linear

from dvp_rl.dvp.policy import Constrained, constrained_logprobs


@dataclass
class HeadCase:
    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    token_ids: Tensor
    log_min_p: Tensor
    temperature: Tensor
    upstream: Tensor
    """Gradient of the log-probs."""

    @classmethod
    def make(
        cls,
        dtype: torch.dtype,
        master: torch.dtype | None = None,
        *,
        tokens: int,
        hidden: int,
        vocab: int,
        bias: bool = True,
        device: str = "cpu",
        **more: Any,
    ) -> Self:
        """`master`: dtype of weight and bias; None: `dtype`. `more`: fields of a subclass."""
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        return cls(
            hidden=normal(tokens, hidden).to(device, dtype).requires_grad_(),
            weight=(normal(vocab, hidden) / 2).to(device, master or dtype).requires_grad_(),
            bias=normal(vocab).to(device, master or dtype).requires_grad_() if bias else None,
            token_ids=torch.randint(vocab, (tokens,), generator=generator).to(device),
            log_min_p=-6 * torch.rand(tokens, generator=generator, dtype=torch.float64).to(device),
            temperature=0.5 + torch.rand(tokens, generator=generator, dtype=torch.float64).to(device),
            upstream=normal(tokens).to(device, torch.promote_types(dtype, torch.float32)),
            **more,
        )

    @property
    def leaves(self) -> list[Tensor]:
        return [t for t in (self.hidden, self.weight, self.bias) if t is not None]

    @property
    def rule(self) -> dict[str, Tensor]:
        return {"log_min_p": self.log_min_p, "temperature": self.temperature}

    def logits(self) -> Tensor:
        dtype = self.hidden.dtype
        return linear(self.hidden, self.weight.to(dtype), None if self.bias is None else self.bias.to(dtype))

    def plain(self) -> Constrained:
        return constrained_logprobs(self.logits(), self.token_ids, **self.rule)

    def gradients(self, policy: Constrained) -> tuple[Tensor, ...]:
        return torch.autograd.grad(policy.logprobs, self.leaves, self.upstream)
