"""Triton kernels for CUDA GPUs of compute capability 8.0 and newer: plain functions that write into given tensors.

None of them allocates, waits for the GPU or chooses a launch size from data, so all can be captured in a CUDA graph.
A float32 operand is multiplied in float32, whatever torch allows for its own matmuls.
"""
