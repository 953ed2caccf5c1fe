"""Facts about FlexOlmo."""
