"""Facts about DeepSeek-MoE."""
