"""Facts about LFM2."""
