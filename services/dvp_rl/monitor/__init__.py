"""Watch the queue and mend it: the live page with its Prometheus metrics, and `dvp-queue`."""
