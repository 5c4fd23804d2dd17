"""The SGLang plugin, with which the ordinary request parameter `min_p` gives the constrained policy and its log-probs.

    plugin      loaded by SGLang through the entry point `sglang.srt.plugins`; the only module that imports SGLang
    checksum    verification of weights that arrive over a process group, before they are loaded
    kept        transport of kept mass and kept count to the response, without waiting for the device
    versions    the SGLang versions it was tested with

Together with dvp_rl.dvp it also forms the wheel `dvp-sglang` (deploy/dvp-sglang), whose package is `dvp_sglang`. Both
use relative imports, because their parent has another name there, and import nothing else but torch and, on a GPU,
Triton.
"""
