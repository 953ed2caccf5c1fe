"""Facts about Phi 1 and 2."""
