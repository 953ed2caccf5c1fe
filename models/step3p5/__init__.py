"""Facts about Step 3.5."""
