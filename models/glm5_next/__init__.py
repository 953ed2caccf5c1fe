"""Facts about GLM-5-Next with its vision tower.."""
