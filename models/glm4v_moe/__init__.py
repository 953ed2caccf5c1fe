"""Facts about GLM-4.5V and 4.6V."""
