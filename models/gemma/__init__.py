"""Facts about Gemma."""
