"""Facts about Beam."""
