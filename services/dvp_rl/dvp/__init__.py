"""Dynamic Vocabulary Pruning: pure functions on tensors, torch only, no I/O.

Source: arXiv 2512.23087, "Taming the Tail: Stable LLM Reinforcement Learning via Dynamic Vocabulary Pruning".

    policy        the constrained policy of one side: set, log-probs, kept mass
    sampler       draws from it
    lm_head       the policy from hidden states, without [tokens, vocabulary] in memory
    pruning       the set of a whole batch, in place, inside an inference server
    evidence      what both sides say about the same tokens
    correction    token veto and importance weights from the mismatch of the two sides
    advantages    rewards minus a baseline
    denominators  divisor of the sum over sequences
    objective     the scalar whose negative gradient is the estimator
    metrics       how far the two sides are apart
"""
