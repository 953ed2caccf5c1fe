"""Facts about Kimi K2.5."""
