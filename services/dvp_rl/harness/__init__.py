"""Environments: what a user writes (trainer/HOOKS.md), and `dvp-harness`, which plays a run's episodes in them."""

from .environment import Environment, Step
from .tools import Tools

__all__ = ["Environment", "Step", "Tools"]
