"""Constrained answers: requests to grammars, grammars to matchers."""
