"""Facts about Granite MoE."""
