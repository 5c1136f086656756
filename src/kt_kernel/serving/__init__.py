"""The interface to engines: options, checks before the start, the hybrid layer, reports."""
