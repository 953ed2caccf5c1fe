"""Facts about Aria with its vision tower."""
