"""``kt tune``: measures a machine, predicts how fast it serves a model, and chooses options."""
