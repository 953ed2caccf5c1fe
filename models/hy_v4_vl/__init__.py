"""Facts about HY4-VL."""
