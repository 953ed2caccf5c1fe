"""Facts about GLM-4 (2024)."""
