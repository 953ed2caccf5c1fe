"""Facts about Qwen2-VL."""
