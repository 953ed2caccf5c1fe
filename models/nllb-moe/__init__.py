"""Facts about NLLB-MoE."""
