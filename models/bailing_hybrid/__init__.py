"""Facts about Ling 2.5 (Bailing hybrid)."""
