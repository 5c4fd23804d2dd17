"""Data pipeline: rows and prompts of a data set, rewards of completions, batches of scored groups."""
