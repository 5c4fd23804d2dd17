"""Monitoring and repair of the queue: the live page with its Prometheus metrics, and `dvp-queue`."""
