"""Facts about Gemma 4 with its towers."""
