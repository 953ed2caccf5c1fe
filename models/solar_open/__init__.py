"""Facts about Solar Open."""
