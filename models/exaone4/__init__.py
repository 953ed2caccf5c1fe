"""Facts about EXAONE 4."""
