"""Facts about Apertus."""
