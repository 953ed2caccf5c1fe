"""Facts about Cohere Command R7B and A."""
