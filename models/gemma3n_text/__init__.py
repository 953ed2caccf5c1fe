"""Facts about Gemma 3n."""
