"""Facts about dots3 note."""
