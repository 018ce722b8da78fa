"""Where the trunk of a model computes: one set of operations, on the CPU's kernels or on a GPU's."""
