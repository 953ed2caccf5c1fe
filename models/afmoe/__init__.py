"""Facts about AFMoE (Arcee Trinity)."""
