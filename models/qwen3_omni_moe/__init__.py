"""Facts about Qwen3-Omni."""
