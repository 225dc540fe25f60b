"""Slow and simple twins of what the product computes natively, to compare with."""
