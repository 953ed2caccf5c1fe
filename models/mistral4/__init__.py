"""Facts about Mistral 4."""
