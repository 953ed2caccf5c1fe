"""Facts about Step-3."""
