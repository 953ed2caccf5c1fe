"""Facts about Kimi K2."""
