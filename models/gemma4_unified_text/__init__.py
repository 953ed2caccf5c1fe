"""Facts about Gemma 4 unified."""
