"""Facts about Llama 4."""
