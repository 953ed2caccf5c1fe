"""Facts about Llama 4 with its vision tower."""
