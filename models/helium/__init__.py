"""Facts about Helium."""
