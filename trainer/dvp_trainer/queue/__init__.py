"""The trainer's side of the queue: prompts become jobs, groups become batches; held-out scores."""
