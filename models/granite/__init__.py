"""Facts about Granite."""
