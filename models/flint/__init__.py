"""Facts about Flint."""
