"""Facts about Laguna."""
