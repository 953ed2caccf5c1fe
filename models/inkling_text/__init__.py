"""Facts about Inkling."""
