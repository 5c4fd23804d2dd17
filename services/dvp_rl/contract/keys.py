"""Redis keys of a run. All of them begin with `dvp:{run_id}:`."""

from __future__ import annotations

from dataclasses import dataclass

REPLICAS = "replicas"
"""Consumer group of the two job streams."""
TRAINER = "trainer"
"""Consumer group of the groups and evals streams."""


@dataclass(frozen=True)
class Keys:
    run_id: str

    @property
    def everything(self) -> str:
        """Pattern of all keys of the run."""
        return self._key("*")

    def _key(self, name: str) -> str:
        return f"dvp:{{{self.run_id}}}:{name}"

    @property
    def jobs(self) -> str:
        """Stream of the trainer's Jobs, consumer group REPLICAS. Entries are deleted when acknowledged."""
        return self._key("jobs")

    @property
    def client_jobs(self) -> str:
        """Like `jobs`, for sink `client`."""
        return self._key("client_jobs")

    @property
    def groups(self) -> str:
        """Stream for sink `train`, consumer group TRAINER. An entry announces a group, which `result` holds, or a
        DeadLetter (a tombstone)."""
        return self._key("groups")

    @property
    def evals(self) -> str:
        """Like `groups`, for sink `eval`."""
        return self._key("evals")

    @property
    def episodes(self) -> str:
        """Sorted set of the episodes that are to be played, as JOB_ID/INDEX, by when a harness may take them (broker's
        clock, ms): while one has it, when its session will have been idle for too long."""
        return self._key("episodes")

    @property
    def dead(self) -> str:
        """Stream of dead letters, each with its job."""
        return self._key("dead")

    @property
    def versions(self) -> str:
        """Stream of Announcements; replicas serve the last one."""
        return self._key("versions")

    @property
    def seq(self) -> str:
        """Counter that allocates weight sequence numbers."""
        return self._key("seq")

    @property
    def pinned(self) -> str:
        """Set of weight seqs that a checkpoint needs."""
        return self._key("pinned")

    @property
    def lease(self) -> str:
        """The trainer's lease: hash of holder and fencing token, with a TTL."""
        return self._key("lease")

    @property
    def fence(self) -> str:
        """Counter of fencing tokens."""
        return self._key("fence")

    @property
    def in_flight(self) -> str:
        """Set of train job ids submitted and not yet trained, dropped or dead."""
        return self._key("in_flight")

    @property
    def uncheckpointed(self) -> str:
        """Set of train job ids trained, or dropped, but not yet covered by a checkpoint."""
        return self._key("uncheckpointed")

    @property
    def counters(self) -> str:
        """Hash of monotonic counters: submitted, committed, redelivered, duplicates, dead, cancelled, overdue, ...; and
        of two times (broker's clock, ms): committed_at, and harness_at, when a harness last did something."""
        return self._key("counters")

    @property
    def replicas(self) -> str:
        """Sorted set of replica ids by last heartbeat (milliseconds of the broker's clock)."""
        return self._key("replicas")

    @property
    def trainer(self) -> str:
        """Hash of the trainer's last report on itself."""
        return self._key("trainer")

    @property
    def backlogs(self) -> str:
        """Stream of backlog sizes, measured at intervals by any replica that is alive."""
        return self._key("backlogs")

    @property
    def closed(self) -> str:
        """Why no jobs are admitted; exists only while the queue is closed."""
        return self._key("closed")

    @property
    def audit(self) -> str:
        """Stream of operators' actions on the run; the only key that survives a purge."""
        return self._key("audit")

    @property
    def client_reserved(self) -> str:
        """Hash from the id of each unfinished client job to the bytes that it may take; `:total` is their sum."""
        return self._key("client_reserved")

    @property
    def client_held(self) -> str:
        """Hash from the id of each finished client job to the bytes of its result, and from `:dead:ENTRY` and
        `:session:ID` to the bytes of a client's dead letter or session; `:total` is their sum."""
        return self._key("client_held")

    @property
    def client_callers(self) -> str:
        """Hash from each field of the two hashes above to its caller, empty for one without limits. `:bytes:CALLER` is
        the sum of a caller's bytes, `:jobs:CALLER` the number of its unfinished jobs."""
        return self._key("client_callers")

    @property
    def client_expiry(self) -> str:
        """Sorted set of the ids of finished client jobs, and of `:session:ID`, by when they expire (broker's clock,
        ms)."""
        return self._key("client_expiry")

    @property
    def client_deadlines(self) -> str:
        """Sorted set of the ids of unfinished client jobs by deadline (broker's clock, ms)."""
        return self._key("client_deadlines")

    @property
    def client_sessions(self) -> str:
        """Sorted set of the ids of clients' open sessions by when they will be forgotten (broker's clock, ms)."""
        return self._key("client_sessions")

    @property
    def transfers(self) -> str:
        """List of TransferRequests from replicas that want a weight version sent."""
        return self._key("transfers")

    def transfer(self, request_id: str) -> str:
        """List with the TransferAnswer to one request."""
        return self._key(f"transfer:{request_id}")

    def job(self, job_id: str) -> str:
        """Hash of one job: state, sink, its entry in the stream (for sink `client`: client_entry, and caller),
        deliveries, error, letter; for episodes: data (the Job), num, left, idle_ms, and session:INDEX and
        deliveries:INDEX of each. Submissions are deduplicated by it."""
        return self._key(f"job:{job_id}")

    def result(self, job_id: str) -> str:
        """The group of a finished job, kept one hour for sink `client`, else until it is acknowledged."""
        return self._key(f"result:{job_id}")

    def played(self, job_id: str) -> str:
        """Hash of a job's finished episodes by index, each a Group, until they are acknowledged."""
        return self._key(f"played:{job_id}")

    def session(self, session_id: str) -> str:
        """Hash of one session: state, caller, nonce, data (a Session), bytes, reward, numbers of turns, branches,
        drifted and tokens, and `turn:ID` with the index of each turn. An episode also has job and index, and no data
        before its first turn: its job's are used. It expires when nobody has used it for its `idle_s`."""
        return self._key(f"session:{session_id}")

    def turns(self, session_id: str) -> str:
        """List of the session's Turns. Expires with the session."""
        return self._key(f"turns:{session_id}")

    def replica(self, replica_id: str) -> str:
        """Hash of one replica's heartbeat."""
        return self._key(f"replica:{replica_id}")
