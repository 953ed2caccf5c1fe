"""Facts about GLM-4 (0414)."""
