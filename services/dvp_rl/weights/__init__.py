"""Weight versions on their way from the trainer's disk to a replica, and `dvp-weights`, which serves them.

    folder      complete Hugging Face folders with a manifest: written, renamed into place, verified, swept
    registry    the version announced last, and those before it; on Redis
    download    folders over HTTP, into a cache that verifies and resumes
    layout      the tensors of a folder, and whether a model can load them
    pieces      the same tensors, cut into what a process group sends at once
    transfers   requests of replicas to be sent a version, and the trainer's offers; on Redis
    app, mirror the server of the trainer's own folders, or of copies

The trainer decides when a version is published or sent, the replica when it is swapped in.
"""
