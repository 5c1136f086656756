"""Calls of every entry of the compiled module with extremes: what test_entries.py runs."""
