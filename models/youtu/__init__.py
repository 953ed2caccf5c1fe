"""Facts about Youtu."""
