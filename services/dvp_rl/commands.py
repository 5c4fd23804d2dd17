"""The programs of the services, as they are installed. Each needs an extra, and says so if that is missing."""

from .extras import needing


def monitor() -> None:
    with needing("services", "dvp-monitor"):
        from .monitor.__main__ import main

        main()


def queue() -> None:
    with needing("services", "dvp-queue"):
        from .monitor.cli import main

        main()


def rollout() -> None:
    with needing("rollout", "dvp-rollout"):
        from .rollout.__main__ import main

        main()


def weights() -> None:
    with needing("services", "dvp-weights"):
        from .weights.__main__ import main

        main()
