"""Facts about Doge."""
