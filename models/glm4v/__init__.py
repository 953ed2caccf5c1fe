"""Facts about GLM-4.1V."""
