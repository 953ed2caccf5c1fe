"""Facts about DeepSeek-V2 and V2-Lite."""
