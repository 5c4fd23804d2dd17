"""Randomness of samples: one counter-based stream per sample, a pure function of the job and the sample's index."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np

from dvp_rl.contract.job import Job

if TYPE_CHECKING:
    from numpy.typing import NDArray


def sample_seed(job: Job, index: int) -> int:
    """63-bit seed of sample `index`.

    Sample 0 uses sampling.seed itself (or a hash of the job id), the others a hash of that and their index. Any sample
    can therefore be drawn again alone, by a job with n = 1 and seed = Sample.seed.
    """
    base = job.sampling.seed if job.sampling.seed is not None else _hash63(job.job_id.encode())
    return base if index == 0 else _hash63(f"{base}:{index}".encode())


def alone(job: Job, index: int) -> Job:
    """Sample `index` as a job of its own: the same draws under the same id."""
    sampling = job.sampling.model_copy(update={"seed": sample_seed(job, index)})
    return job.model_copy(update={"n": 1, "sampling": sampling})


def seeded(job: Job, name: str) -> Job:
    """The job with a stream that its seed and the name determine together."""
    seed = _hash63(f"{job.sampling.seed}:{name}".encode())
    return job.model_copy(update={"sampling": job.sampling.model_copy(update={"seed": seed})})


def _hash63(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") >> 1


class UniformStream:
    """The draws of one sample: draw t decides token t, whatever else is in the batch."""

    def __init__(self, seed: int) -> None:
        self._generator = np.random.Generator(np.random.Philox(key=seed))

    def next(self, count: int) -> NDArray[np.float64]:
        """[count] numbers in [0, 1), with 53 random bits each. Chunk sizes do not change the stream."""
        return self._generator.random(count)
