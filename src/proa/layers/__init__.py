"""Trunk layers of the CPU path: float32 activations, weights in the format of the checkpoint."""
