"""Facts about Jamba."""
