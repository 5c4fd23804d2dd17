"""From a batch to the next weights: the model, how sequences lie in it, the step, the ranks, what they write."""
