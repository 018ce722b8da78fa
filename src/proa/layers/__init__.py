"""Trunk layers on any device: float32 activations, weights in the format of the checkpoint."""
