"""Facts about Seed-OSS."""
