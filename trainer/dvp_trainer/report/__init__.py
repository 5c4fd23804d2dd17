"""Reports of a run: metrics and their sinks, the HTML page, every token's log-probs."""
