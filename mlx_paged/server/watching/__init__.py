"""Monitoring: metrics, the page, and reports on the prefix cache."""
