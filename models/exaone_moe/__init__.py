"""Facts about EXAONE MoE (K-EXAONE)."""
