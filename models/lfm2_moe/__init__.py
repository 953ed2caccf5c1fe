"""Facts about LFM2 MoE."""
