"""Facts about Inkling 2 with its towers."""
