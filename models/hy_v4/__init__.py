"""Facts about HY4."""
