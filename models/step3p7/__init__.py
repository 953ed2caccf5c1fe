"""Facts about Step 3.7 with its vision tower."""
