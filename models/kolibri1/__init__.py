"""Facts about Kolibri 1."""
