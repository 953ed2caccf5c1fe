"""Facts about Qwen4 (experimental)."""
