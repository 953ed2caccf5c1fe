"""Facts about Aria."""
