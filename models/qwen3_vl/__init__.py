"""Facts about Qwen3-VL."""
