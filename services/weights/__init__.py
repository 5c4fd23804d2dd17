"""`dvp-weights`: the trainer's weight folders over HTTP, for replicas that do not see its volume."""
