"""Facts about Granite 4 hybrid."""
