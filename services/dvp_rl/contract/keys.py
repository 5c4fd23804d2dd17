"""Redis keys. All of a run begin with its id in braces."""

from __future__ import annotations

from dataclasses import dataclass

REPLICAS = "replicas"
"""Consumer group of the streams of jobs."""
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
        """The same for sink `client`."""
        return self._key("client_jobs")

    @property
    def groups(self) -> str:
        """Stream that tells of each group (`result` holds it) or DeadLetter (a tombstone) for sink `train`, consumer
        group TRAINER."""
        return self._key("groups")

    @property
    def evals(self) -> str:
        """The same for sink `eval`."""
        return self._key("evals")

    @property
    def dead(self) -> str:
        """Stream of dead letters, each with its job."""
        return self._key("dead")

    @property
    def versions(self) -> str:
        """Stream of Announcement; the last entry is what to serve."""
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
        """The trainer's lease: hash of holder and fencing token, with a time to live."""
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
        """Hash of monotonic counters: submitted, committed, redelivered, duplicates, dead, cancelled, overdue, ..."""
        return self._key("counters")

    @property
    def replicas(self) -> str:
        """Sorted set of replica ids by last heartbeat (milliseconds of the broker's clock)."""
        return self._key("replicas")

    @property
    def trainer(self) -> str:
        """Hash: what the trainer last said of itself."""
        return self._key("trainer")

    @property
    def backlogs(self) -> str:
        """Stream of how many jobs waited, measured at intervals by whichever replica is alive."""
        return self._key("backlogs")

    @property
    def closed(self) -> str:
        """Exists while the queue is drained: why no jobs are admitted."""
        return self._key("closed")

    @property
    def audit(self) -> str:
        """Stream of what people did to the run; the only key that outlives a purge."""
        return self._key("audit")

    @property
    def client_reserved(self) -> str:
        """Hash: job id of a client, in work, to the bytes that it may come to; `:total` to their sum."""
        return self._key("client_reserved")

    @property
    def client_held(self) -> str:
        """Hash: job id of a client, done, to the bytes of its result; `:dead:ENTRY` to those of a client's dead letter;
        `:total` to their sum."""
        return self._key("client_held")

    @property
    def client_callers(self) -> str:
        """Hash: each name in the two above to its caller, empty for one without limits; `:bytes:CALLER` to what these
        come to together, `:jobs:CALLER` to how many are in work."""
        return self._key("client_callers")

    @property
    def client_expiry(self) -> str:
        """Sorted set of clients' job ids that are done, by the end of their results (broker's clock, ms)."""
        return self._key("client_expiry")

    @property
    def client_deadlines(self) -> str:
        """Sorted set of clients' job ids in work, by when nobody wants the result any more (broker's clock, ms)."""
        return self._key("client_deadlines")

    @property
    def transfers(self) -> str:
        """List of TransferRequest: replicas that want a weight version sent."""
        return self._key("transfers")

    def transfer(self, request_id: str) -> str:
        """List with the TransferAnswer to one request."""
        return self._key(f"transfer:{request_id}")

    def job(self, job_id: str) -> str:
        """Hash of one job's state: state, sink, entry (for sink `client` client_entry, and caller) in its stream,
        deliveries, error, letter. The dedupe key."""
        return self._key(f"job:{job_id}")

    def result(self, job_id: str) -> str:
        """The group of a job that is done: for sink `client` kept one hour, else until it is acknowledged."""
        return self._key(f"result:{job_id}")

    def replica(self, replica_id: str) -> str:
        """Hash of one replica's heartbeat."""
        return self._key(f"replica:{replica_id}")
