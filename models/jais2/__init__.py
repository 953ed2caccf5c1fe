"""Facts about Jais 2."""
