"""The vLLM plugin, with which the ordinary request parameter `min_p` also gives kept mass and kept count.

    plugin      loaded by vLLM through the entry point `vllm.general_plugins`; changes its sampler and its processes
    packing     kept mass and kept count as one integer, in the place of the rank of the sampled token
    worker      what a replica calls in vLLM's workers: facts, and a reload that also renews tied embeddings
    guard       vLLM's routes for swaps need a key, too
    versions    the vLLM versions it was tested with

Together with dvp_rl.dvp it also forms the wheel `dvp-vllm` (deploy/dvp-vllm), whose package is `dvp_vllm`. Both use
relative imports, because their parent has another name there, and import nothing else but torch and vLLM.
"""
