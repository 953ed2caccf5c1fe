"""Facts about Bailing hybrid."""
