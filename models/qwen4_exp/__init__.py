"""Facts about Qwen4 (experimental) with its vision tower.."""
