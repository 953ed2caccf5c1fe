"""Facts about Cohere 2 MoE."""
