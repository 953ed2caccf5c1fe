"""Facts about nanochat."""
