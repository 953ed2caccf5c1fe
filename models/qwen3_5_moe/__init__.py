"""Facts about Qwen3.5-MoE with its vision tower."""
