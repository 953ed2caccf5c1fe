"""Facts about DeepSeek-V3.2."""
