"""Facts about Bamba."""
