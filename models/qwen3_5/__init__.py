"""Facts about Qwen3.5 (dense) with its vision tower.."""
