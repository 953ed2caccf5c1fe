"""Facts about Ling and Ring 1 (Bailing MoE)."""
