"""Facts about Muse Spark."""
