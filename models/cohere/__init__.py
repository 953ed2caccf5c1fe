"""Facts about Cohere Command R."""
