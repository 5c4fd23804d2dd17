"""What a run goes on from: checkpoints, and the ledgers that they cut."""
