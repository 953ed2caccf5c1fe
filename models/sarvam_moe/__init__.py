"""Facts about Sarvam MoE."""
