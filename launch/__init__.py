"""Starts and supervises the processes: workers, router, or both."""
