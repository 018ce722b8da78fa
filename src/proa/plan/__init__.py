"""Whether a model fits a machine, and what it will do there, before anything is downloaded or loaded."""
