"""What an engine is given: options, checks before the start, the hybrid layer, reports."""
