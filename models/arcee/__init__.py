"""Facts about Arcee (AFM)."""
