"""Facts about JetMoE."""
