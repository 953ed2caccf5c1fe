"""Facts about Inkling 2."""
