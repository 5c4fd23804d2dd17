"""The programs of the services, as they are installed. Each needs an extra, and says so if that is missing."""

from .extras import require


def harness() -> None:
    require("services", "dvp-harness")
    from .harness.__main__ import main

    main()


def monitor() -> None:
    require("services", "dvp-monitor")
    from .monitor.__main__ import main

    main()


def queue() -> None:
    require("services", "dvp-queue")
    from .monitor.cli import main

    main()


def rollout() -> None:
    require("rollout", "dvp-rollout")
    from .rollout.__main__ import main

    main()


def weights() -> None:
    require("services", "dvp-weights")
    from .weights.__main__ import main

    main()
