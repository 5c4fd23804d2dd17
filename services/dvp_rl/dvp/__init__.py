"""Dynamic Vocabulary Pruning: pure functions on tensors, torch only, no I/O.

Source: arXiv 2512.23087, "Taming the Tail: Stable LLM Reinforcement Learning via Dynamic Vocabulary Pruning".

    policy        the constrained policy of one side: set, log-probs, kept mass
    sampler       draws from it
    correction    what the mismatch of two sides does to a sequence: token veto, importance weight
    denominators  what the sum over sequences is divided by
    objective     the scalar whose gradient is the estimator
    metrics       how far the two sides are apart
"""
