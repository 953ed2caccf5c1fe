"""Facts about StarCoder2."""
