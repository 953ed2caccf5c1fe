"""Facts about Mistral 3."""
