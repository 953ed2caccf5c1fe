"""Facts about Qwen3.5 (dense)."""
