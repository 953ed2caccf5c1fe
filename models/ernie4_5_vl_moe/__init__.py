"""Facts about ERNIE 4.5 VL."""
