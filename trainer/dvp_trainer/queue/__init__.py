"""The trainer's side of the queue: turns prompts into jobs and groups into batches, and computes held-out scores."""
