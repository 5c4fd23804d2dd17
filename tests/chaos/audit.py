"""Audit of a finished run, from evidence that is independent of the run's own books."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from dvp_rl.contract.group import Group
from dvp_rl.contract.job import job_position
from dvp_rl.contract.sampling import Sampling
from dvp_rl.contract.weights import WeightVersion
from dvp_rl.weights.folder import folder_name
from dvp_trainer.resume.checkpoint import Checkpoints
from dvp_trainer.resume.ledger import read_ledger
from tests.unit.dvp.oracle import Floats, policy

from .recorder import Evidence, Trained
from .system import Layout

TOLERANCE = 1e-4
"""Nats allowed between float32 in the engine and float64 here; the previous step's weights differ by more."""


@dataclass
class Audit:
    steps: int = 0
    groups: int = 0
    tokens: int = 0
    environment_tokens: int = 0
    batches_lost_to_kills: int = 0
    """Batches trained but never checkpointed, and trained again by the next incarnation."""
    lost: list[str] = field(default_factory=list)
    twice: list[str] = field(default_factory=list)
    wrong_tokens: int = 0
    farthest: float = 0.0
    """Largest difference between a token's log-prob and that of the version it names, in nats."""
    sensitivity: float = 0.0
    """Share of tokens that would fail if they named the previous version instead of their own."""
    versions: int = 0

    @property
    def faults(self) -> list[str]:
        found = [f"groups lost: {self.lost[:5]}"] if self.lost else []
        found += [f"groups trained twice: {self.twice[:5]}"] if self.twice else []
        found += [f"{self.wrong_tokens} of {self.tokens} tokens name a wrong version"] if self.wrong_tokens else []
        return found


def audit(layout: Layout, every: int = 1) -> Audit:
    """Audits all groups, and the tokens of every `every`-th version."""
    evidence, result = Evidence(layout.folder / "evidence"), Audit()
    everything = list(evidence.trained())
    final = {record.step: record for record in everything if record.step <= layout.newest_step()}
    result.steps, result.batches_lost_to_kills = len(final), len(everything) - len(final)
    check_books(layout, final, result)
    check_tokens(layout, evidence, everything, every, result)
    return result


def check_books(layout: Layout, final: dict[int, Trained], result: Audit) -> None:
    """Compares the batches that made the final weights with the ledgers and the newest checkpoint."""
    found = Checkpoints(layout.out / "checkpoints", keep=1).load()
    assert found is not None
    progress = found[0]
    ended = list(read_ledger(layout.out / "consumed.jsonl"))
    submitted = [entry["job_id"] for entry in read_ledger(layout.out / "submitted.jsonl")]
    trained = [group.job_id for record in final.values() for group in record.groups]
    result.groups = len(trained)
    result.twice = _repeated(trained) + _repeated(entry["job_id"] for entry in ended) + _repeated(submitted)
    positions = [job_position(id)[0] for id in trained]
    result.twice += [f"position {position}" for position in _repeated(positions)]
    result.lost = sorted(set(submitted) - {entry["job_id"] for entry in ended} - set(progress.outstanding))
    accounted = {*positions, *(job_position(id)[0] for id in progress.outstanding), *(p for p, _ in progress.retries)}
    result.lost += [f"position {p}" for p in range(progress.cursor) if p not in accounted]
    booked = [entry["job_id"] for entry in ended if entry["outcome"] == "trained"]
    if sorted(booked) != sorted(trained):
        result.lost.append(f"booked as trained {len(booked)}, trained {len(trained)}")
    if sorted(final) != list(range(1, progress.step + 1)):
        result.lost.append(f"steps {sorted(set(range(1, progress.step + 1)) - final.keys())} were never trained")


def _repeated(values: Iterable[object]) -> list[str]:
    return [str(value) for value, count in Counter(values).items() if count > 1]


def check_tokens(layout: Layout, evidence: Evidence, trained: Iterable[Trained], every: int, result: Audit) -> None:
    """Checks the trained tokens, of lost timelines too, against the weights they name, in float64."""
    groups = {(group.job_id, group.replica_id, group.finished_at): group for r in trained for group in r.groups}
    samples = [sample for group in groups.values() for sample in group.samples]
    result.environment_tokens = sum(len(sample.token_ids) - sample.num_model_tokens for sample in samples)
    files = {int(path.stem.removeprefix("weights-")): path for path in evidence.weights.iterdir()}
    by_seq: dict[int, list[Group]] = defaultdict(list)
    for group in groups.values():
        for seq in _seqs(group):
            by_seq[seq].append(group)
            by_seq[seq - 1].append(group)
    result.versions = len(by_seq)
    model = AutoModelForCausalLM.from_pretrained(layout.model, dtype=torch.float64).eval()
    noticed = 0
    for seq in sorted(seq for seq in by_seq.keys() & files.keys() if seq % every == 0):
        model.load_state_dict({name: weight.double() for name, weight in load_file(files[seq]).items()}, strict=False)
        for distances, named in _distances(model, by_seq[seq], seq):
            if named:
                result.tokens += len(distances)
                result.wrong_tokens += int((~(distances <= TOLERANCE)).sum())
                result.farthest = max(result.farthest, float(distances.max()))
            else:
                noticed += int((~(distances <= TOLERANCE)).sum())
    missing = {seq for group in groups.values() for seq in _seqs(group)} - files.keys()
    if missing:
        result.lost.append(f"weights of versions {sorted(missing)}")
    result.sensitivity = noticed / max(result.tokens, 1)


def _seqs(group: Group) -> set[int]:
    return {WeightVersion.parse(span.version).seq for sample in group.samples for span in sample.versions}


@torch.inference_mode()
def _distances(model: torch.nn.Module, groups: Iterable[Group], seq: int) -> Iterator[tuple[np.ndarray, bool]]:
    """Distances between reported and the model's log-probs, for tokens that name `seq` (True) or `seq + 1` (False)."""
    for group in groups:
        for sample in group.samples:
            read = sample.continues(group.prompt_ids)
            ids = np.concatenate([read, sample.token_ids])
            logits = model(torch.from_numpy(ids.astype(np.int64))[None]).logits[0, len(read) - 1 : -1].numpy()
            drawn = sample.is_model
            distances = np.zeros(len(drawn))
            distances[drawn] = distance(logits[drawn], group.sampling, sample.token_ids[drawn], sample.logprobs)
            for span in sample.versions:
                named = WeightVersion.parse(span.version).seq
                if named in (seq, seq + 1):
                    yield distances[span.start : span.end], named == seq


def distance(logits: Floats, sampling: Sampling, ids: np.ndarray, said: np.ndarray) -> Floats:
    """Nats [T] to the nearest log-prob under any set that float32 may have kept. A token within TOLERANCE of the
    threshold may or may not be in the set, and moves the others' log-probs by its mass. inf where the token itself is
    below that range."""
    wide = policy(logits, sampling.log_min_p - TOLERANCE, sampling.temperature)
    narrow = policy(logits, min(0.0, sampling.log_min_p + TOLERANCE), sampling.temperature)
    low = wide.logprobs[np.arange(len(ids)), ids]
    high = low + np.log(wide.kept_mass / narrow.kept_mass)
    return np.maximum(np.maximum(low - said, said - high), 0.0)


def final_parameters(layout: Layout) -> dict[str, torch.Tensor]:
    """The weights that were announced with the newest checkpoint."""
    found = Checkpoints(layout.out / "checkpoints", keep=1).load()
    assert found is not None
    name = f"{folder_name(found[0].seq)}.safetensors"
    parameters: dict[str, torch.Tensor] = load_file(Evidence(layout.folder / "evidence").weights / name)
    return parameters
