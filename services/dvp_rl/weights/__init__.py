"""A version of the weights on its way from the trainer's disk to a replica; and `dvp-weights`, which serves them.

    folder      complete Hugging Face folders with a manifest: written, renamed into place, verified, swept
    registry    which version was announced last, and those before it; on Redis
    download    folders over HTTP, into a cache that verifies and resumes
    layout      the tensors of a folder, and whether a model can take them
    pieces      the same tensors cut into what a process group sends at once
    transfers   who asks to be sent which version, and what is offered; on Redis
    app, mirror the server, of the trainer's own folders or of copies

When a version is published or sent is the trainer's business, when it is swapped in the replica's.
"""
