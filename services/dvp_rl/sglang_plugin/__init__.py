"""What runs inside SGLang: there the ordinary request parameter `min_p` gives the constrained policy and its log-probs.

    plugin      what SGLang loads through the entry point `sglang.srt.plugins`; the only module that imports SGLang
    pruning     the set, the kept mass and the kept count of a batch of logits
    checksum    weights that come over a process group are checked before they are loaded
    kept        how the two reach the response without waiting for the device
    versions    which SGLang it was tested with

Together with dvp_rl.dvp it is also a wheel of its own, `dvp-sglang` (deploy/dvp-sglang), whose package is `dvp_sglang`.
Both import relatively, because their parent has another name there, and nothing but torch.
"""
