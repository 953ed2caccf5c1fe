"""Facts about Switch Transformers."""
