"""Facts about GLM-4.5V."""
