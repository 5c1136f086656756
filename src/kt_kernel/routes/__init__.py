"""Where tokens were routed: statistics, records, and the simulator of expert caches.

Uses numpy only, no engine and no device.
"""
