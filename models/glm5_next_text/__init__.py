"""Facts about GLM-5-Next."""
