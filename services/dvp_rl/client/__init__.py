"""Typed HTTP client of the rollout service. It is what an installation without extras can do.

with Client("http://127.0.0.1:8000") as client:
    answer = client.rollout(prompt="2+2=", n=4, sampling={"max_tokens": 16})
    print(answer.samples[0].text)
"""

from .client import AsyncClient, Client
from .retry import Retry

__all__ = ["AsyncClient", "Client", "Retry"]
