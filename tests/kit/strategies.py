"""Hypothesis strategies for every record that crosses a process boundary."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, pairwise

from hypothesis import strategies as st

from dvp_rl.contract.canary import MARGINS, Canary, Walk
from dvp_rl.contract.group import (
    DeadLetter,
    EngineFacts,
    EnvironmentSpan,
    FinishReason,
    Group,
    LogprobKind,
    Sample,
    VersionSpan,
)
from dvp_rl.contract.job import Job, Sink
from dvp_rl.contract.metrics import LARGEST, NAME
from dvp_rl.contract.record import Record
from dvp_rl.contract.sampling import MAX_SEED, Sampling
from dvp_rl.contract.session import Fork, Session, Turn
from dvp_rl.contract.transfer import Offer, Piece, TensorSpec, TransferAnswer, TransferRequest
from dvp_rl.contract.weights import Announcement, Manifest, WeightFile, WeightRoute

IDS = st.from_regex(r"\A[A-Za-z0-9][A-Za-z0-9_.-]{0,20}\Z")
TOKENS = st.integers(0, 2**31 - 1)
TIMES = st.floats(0, 4e9)
METRICS = st.dictionaries(st.from_regex(rf"\A{NAME}\Z"), st.floats(-LARGEST, LARGEST), max_size=3)
TEXT = st.text(max_size=40)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
METADATA = st.dictionaries(TEXT, JSON, max_size=3)
VERSIONS = st.builds(lambda run, seq: f"{run}:{seq}:0123abcd", IDS, st.integers(0, 2**53))
SAMPLINGS = st.builds(
    Sampling,
    log_min_p=st.floats(-1e4, 0),
    temperature=st.floats(0.01, 100),
    max_tokens=st.integers(1, 1_000_000),
    stop=st.lists(st.text(min_size=1, max_size=8), max_size=3).map(tuple),
    stop_token_ids=st.lists(TOKENS, max_size=3).map(tuple),
    seed=st.none() | st.integers(0, MAX_SEED),
)


@st.composite
def _samples(draw: st.DrawFn, *, turns: bool) -> Sample:
    """A sample of one or two versions or, if `turns`, of up to five segments; inner ones may be the environment's."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=5 if turns else 2))
    spans = list(pairwise([0, *accumulate(sizes)]))
    between = [turns and 0 < i < len(spans) - 1 and draw(st.booleans()) for i in range(len(spans))]
    M = sum(size for size, given in zip(sizes, between, strict=True) if not given)

    def array(element: st.SearchStrategy[float], length: int = M) -> list[float]:
        return draw(st.lists(element, min_size=length, max_size=length))

    return Sample(
        token_ids=array(TOKENS, sum(sizes)),
        logprobs=array(st.floats(-1e4, 0, width=32)),
        kept_mass=array(st.floats(2**-20, 1, width=32)),
        kept_count=array(st.integers(1, 2**31 - 1)),
        finish_reason=draw(st.sampled_from(FinishReason)),
        versions=tuple(
            VersionSpan(version=draw(VERSIONS), start=start, end=end)
            for (start, end), given in zip(spans, between, strict=True)
            if not given
        ),
        environment=tuple(
            EnvironmentSpan(start=start, end=end) for (start, end), given in zip(spans, between, strict=True) if given
        ),
        prompt_ids=draw(st.none() | st.lists(TOKENS, min_size=1, max_size=5)) if turns else None,
        seed=draw(st.integers(0, MAX_SEED)),
    )


ENGINES = st.builds(EngineFacts, name=TEXT, version=TEXT, dtype=TEXT, logprob_kind=st.sampled_from(LogprobKind))
SAMPLES = _samples(turns=True)
JOBS = st.builds(
    Job,
    job_id=IDS,
    run_id=IDS,
    prompt_ids=st.lists(TOKENS, min_size=1, max_size=20),
    n=st.integers(1, 1024),
    sampling=SAMPLINGS,
    sink=st.sampled_from(Sink),
    metadata=METADATA,
    min_seq=st.integers(0, 2**53),
    deadline=st.none() | TIMES,
    submitted_at=TIMES,
)


@st.composite
def _groups(draw: st.DrawFn, *, turns: bool) -> Group:
    sizes = draw(st.lists(st.integers(1, 2) if turns else st.just(1), min_size=1, max_size=3))
    return Group(
        job_id=draw(IDS),
        run_id=draw(IDS),
        prompt_ids=draw(st.lists(TOKENS, min_size=1, max_size=20)),
        sampling=draw(SAMPLINGS),
        samples=tuple(draw(_samples(turns=turns)) for _ in range(sum(sizes))),
        episode_sizes=tuple(sizes) if turns else (),
        metrics=tuple(draw(METRICS) for _ in sizes) if turns else (),
        sink=draw(st.sampled_from(Sink)),
        replica_id=draw(TEXT),
        engine=draw(ENGINES),
        metadata=draw(METADATA),
        generate_s=draw(TIMES),
        finished_at=draw(TIMES),
    )


GROUPS = _groups(turns=True)
PLAIN_GROUPS = _groups(turns=False)
"""Groups of plain completions."""
DEAD_LETTERS = st.builds(
    DeadLetter,
    job_id=IDS,
    run_id=IDS,
    sink=st.sampled_from(Sink),
    error=TEXT,
    deliveries=st.integers(0, 100),
    replica_id=TEXT,
    died_at=TIMES,
)
SHA256 = st.from_regex(r"\A[0-9a-f]{64}\Z")
FILES = st.builds(WeightFile, name=IDS, size=st.integers(0, 2**53), sha256=SHA256)
MANIFESTS = st.builds(
    Manifest,
    run_id=IDS,
    seq=st.integers(0, 2**53),
    step=st.integers(0, 2**53),
    files=st.lists(FILES, max_size=3).map(tuple),
)
ANNOUNCEMENTS = st.builds(
    Announcement,
    version=VERSIONS,
    step=st.integers(0, 2**53),
    folder=TEXT,
    url=st.none() | TEXT.map("http://{}".format),
    min_seq=st.integers(0, 2**53),
    announced_at=TIMES,
    route=st.sampled_from(WeightRoute),
)
HEX = st.from_regex(r"\A[0-9a-f]{32}\Z")
TENSORS = st.builds(TensorSpec, name=TEXT, dtype=TEXT, shape=st.lists(st.integers(0, 2**31), max_size=3).map(tuple))
PIECES = st.builds(Piece, tensors=st.lists(TENSORS, min_size=1, max_size=3).map(tuple), sha256=SHA256)
WALKS = st.integers(1, 4).flatmap(
    lambda length: st.builds(
        Walk,
        prompt_ids=st.lists(TOKENS, min_size=1, max_size=5).map(tuple),
        token_ids=st.lists(TOKENS, min_size=length, max_size=length).map(tuple),
        logprobs=st.lists(st.floats(-99, 0), min_size=length, max_size=length).map(tuple),
        gaps=st.lists(st.floats(0, 99), min_size=length, max_size=length).map(tuple),
        kept=st.tuples(*[st.tuples(st.integers(1, 2**31), st.integers(1, 2**31))] * len(MARGINS)),
    )
)
CANARIES = st.builds(
    Canary,
    dtype=TEXT,
    log_min_p=st.floats(-99, 0),
    temperature=st.floats(0.01, 9),
    walks=st.lists(WALKS, min_size=1, max_size=3).map(tuple),
)
OFFERS = st.builds(
    Offer,
    version=VERSIONS,
    host=TEXT,
    port=st.integers(1, 65535),
    size=st.integers(2, 64),
    group=HEX,
    backend=st.sampled_from(("gloo", "nccl")),
    pieces=st.lists(PIECES, max_size=3).map(tuple),
    canary=st.none() | CANARIES,
)
TRANSFER_REQUESTS = st.builds(TransferRequest, id=HEX, version=VERSIONS, receivers=st.integers(1, 64), device=TEXT)
TRANSFER_ANSWERS = st.builds(TransferAnswer, offer=st.none() | OFFERS, error=TEXT)
SESSIONS = st.builds(
    Session,
    session_id=IDS,
    run_id=IDS,
    sampling=SAMPLINGS,
    chat_template_kwargs=METADATA,
    metadata=METADATA,
    idle_s=st.floats(0.1, 30 * 86_400),
)
DIGESTS = st.text("0123456789abcdef", min_size=32, max_size=32)
TURNS = st.builds(
    Turn,
    turn_id=IDS,
    parent=st.none() | st.integers(0, 2**31),
    context_ids=st.lists(TOKENS, min_size=1, max_size=5),
    sample=_samples(turns=False),
    engine=ENGINES,
    replica_id=IDS,
    num_chars=st.integers(0, 2**40),
    text_digest=DIGESTS,
    answer_digest=DIGESTS,
    fork=st.none() | st.sampled_from(Fork),
    at=st.floats(0, 2e9),
)
STRATEGIES: dict[type[Record], st.SearchStrategy[Record]] = {
    Sampling: SAMPLINGS,
    Job: JOBS,
    Sample: SAMPLES,
    EngineFacts: ENGINES,
    Group: GROUPS,
    DeadLetter: DEAD_LETTERS,
    Session: SESSIONS,
    Turn: TURNS,
    WeightFile: FILES,
    Manifest: MANIFESTS,
    Announcement: ANNOUNCEMENTS,
    TensorSpec: TENSORS,
    Piece: PIECES,
    Walk: WALKS,
    Canary: CANARIES,
    Offer: OFFERS,
    TransferRequest: TRANSFER_REQUESTS,
    TransferAnswer: TRANSFER_ANSWERS,
}
RECORDS = st.one_of(*STRATEGIES.values())
Damage = Callable[[bytes], bytes]


@st.composite
def damages(draw: st.DrawFn) -> Damage:
    """Functions that damage bytes: truncate them, flip bits, append junk, or replace a prefix with junk."""
    position, byte = draw(st.integers(0, 2**16)), draw(st.integers(1, 255))
    junk = draw(st.binary(max_size=30))

    def flip(data: bytes) -> bytes:
        at = position % len(data)
        return data[:at] + bytes([data[at] ^ byte]) + data[at + 1 :]

    kinds: list[Damage] = [
        lambda data: data[: position % len(data)],
        flip,
        lambda data: data + b"\x00" + junk,
        lambda data: junk + data[position % len(data) :],
    ]
    return draw(st.sampled_from(kinds))
