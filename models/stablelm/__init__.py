"""Facts about StableLM."""
