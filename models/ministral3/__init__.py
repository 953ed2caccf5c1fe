"""Facts about Ministral 3."""
