"""Diagnostics and studies. Each returns a `Study`, which study.py writes as JSON and page.py as PNG and HTML."""
