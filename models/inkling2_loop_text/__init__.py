"""Facts about Inkling 2 Loop."""
