"""Facts about Qwen3-Next."""
