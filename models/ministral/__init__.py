"""Facts about Ministral."""
