"""The wrappers of a MoE layer: settings, loading, placement of experts, forward passes."""
