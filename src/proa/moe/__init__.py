"""The mixture-of-experts layer: router, where experts run, and the sum with the shared experts. Knows no model."""
