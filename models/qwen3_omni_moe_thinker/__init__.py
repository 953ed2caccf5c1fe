"""Facts about Qwen3-Omni's thinker."""
