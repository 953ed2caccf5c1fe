"""Facts about Phi-3.5-MoE."""
