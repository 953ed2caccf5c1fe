"""Facts about DeepSeek-VL2."""
