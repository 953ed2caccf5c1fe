"""Facts about Gemma 4."""
