"""Facts about Ling and Ring 2 (Bailing MoE V2)."""
