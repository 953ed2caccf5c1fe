"""Facts about Qwen2.5-VL."""
