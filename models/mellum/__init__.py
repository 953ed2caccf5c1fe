"""Facts about Mellum."""
