"""Facts about Lara Mini."""
