"""Facts about DeepSeek-V4."""
