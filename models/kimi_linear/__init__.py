"""Facts about Kimi Linear."""
