"""proa: mixture-of-experts serving on one workstation."""

__version__ = "0.1.0"
