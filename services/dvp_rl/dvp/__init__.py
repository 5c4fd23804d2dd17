"""Dynamic Vocabulary Pruning: pure functions on tensors, torch only, no I/O.

Source: arXiv 2512.23087, "Taming the Tail: Stable LLM Reinforcement Learning via Dynamic Vocabulary Pruning".

    policy        the constrained policy of one side: set, log-probs, kept mass
    sampler       draws from it
    lm_head       the same from hidden states, without [tokens, vocabulary] in memory
    evidence      what both sides say about the same tokens
    correction    token veto and importance weights from the mismatch of the two sides
    advantages    rewards minus a baseline
    denominators  what the sum over sequences is divided by
    objective     the scalar whose gradient is the estimator
    metrics       how far the two sides are apart
"""
