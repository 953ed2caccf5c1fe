"""Facts about Falcon-H1."""
