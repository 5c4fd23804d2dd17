"""From a data set to batches: rows and their prompts, what completions are worth, groups that were scored."""
