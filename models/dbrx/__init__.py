"""Facts about DBRX."""
