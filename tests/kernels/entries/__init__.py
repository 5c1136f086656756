"""Calls every entry of the compiled module with extreme values, for test_entries.py."""
