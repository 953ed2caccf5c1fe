"""Facts about Zaya."""
