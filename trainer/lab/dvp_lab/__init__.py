"""Diagnostics and studies. Each hands over a `Study` (study.py), which page.py writes as JSON, PNG and one page."""
