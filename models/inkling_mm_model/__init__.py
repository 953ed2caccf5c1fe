"""Facts about Inkling with its vision and audio towers.."""
