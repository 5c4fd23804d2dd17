"""State that a run resumes from: checkpoints, and ledgers, which are truncated to a checkpoint."""
