"""Facts about LongCat-Flash with n-gram embeddings beside those of tokens."""
