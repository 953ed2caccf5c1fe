"""Facts about GLM-5."""
