"""Training: the model, the layout of sequences, the optimizer step, the ranks and the files they write."""
