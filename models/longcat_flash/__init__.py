"""Facts about LongCat-Flash."""
