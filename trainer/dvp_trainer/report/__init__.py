"""What a run tells: metrics and where they go, the page, every token's log-probs."""
