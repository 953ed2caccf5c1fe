"""Facts about Kimi-VL."""
