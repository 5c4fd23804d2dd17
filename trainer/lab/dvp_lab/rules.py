"""Pruning rules: the same threshold at every position, or one that depends on the position's entropy."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from dvp_rl.dvp.policy import Setting, entropy

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

RAISED = str.maketrans("-.0123456789", "⁻·⁰¹²³⁴⁵⁶⁷⁸⁹")


class Rule(NamedTuple):
    """log rho at a position: min(0, log_min_p - slope * H), H the full entropy in nats of the side's OWN logits.

    Slope 0 is the paper's fixed rho. A slope > 0 prunes less where the model is unsure. Both sides apply the same rule,
    but the mismatch makes their entropies differ, so their thresholds differ by slope times that.
    """

    log_min_p: float
    slope: float = 0.0

    def __call__(self, logits: Float[Tensor, "*batch vocab"]) -> Setting:
        if not self.slope:
            return self.log_min_p
        H = entropy(logits, log_min_p=-math.inf, temperature=1.0).double()
        return (self.log_min_p - self.slope * H).clamp(max=0.0)

    @property
    def prunes(self) -> bool:
        return self.log_min_p > -math.inf

    @property
    def nats(self) -> str:
        """-log rho of a fixed rule: its label on an axis."""
        return f"{-self.log_min_p:g}" if self.prunes else "∞"

    @property
    def label(self) -> str:
        if not self.prunes:
            return "0"
        if not self.slope:
            return "e" + f"{self.log_min_p:g}".translate(RAISED)
        return f"exp({self.log_min_p:.3g} {'−' if self.slope > 0 else '+'} {abs(self.slope):g} H)".replace("-", "−")


NOTHING_PRUNED = Rule(-math.inf)
AXIS = "−log rho (nats)"
"""Label of an axis whose ticks are `Rule.nats`."""
