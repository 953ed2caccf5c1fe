"""Facts about Mistral Large 4."""
