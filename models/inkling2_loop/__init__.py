"""Facts about Inkling 2 Loop with its towers.."""
