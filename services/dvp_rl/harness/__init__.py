"""Environments: what a user writes (trainer/HOOKS.md), and `dvp-harness`, which plays a run's episodes in them."""

from .environment import Agent, Endpoint, Environment, Step
from .tools import Tools

__all__ = ["Agent", "Endpoint", "Environment", "Step", "Tools"]
