"""The engine process: scheduling, forward passes, sampling. Importing this package loads no torch."""
