"""Facts about HY3."""
