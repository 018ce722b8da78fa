"""The engine process: scheduling, forward passes, sampling. Start it with `python -m proa.engine`; importing this loads no torch."""
