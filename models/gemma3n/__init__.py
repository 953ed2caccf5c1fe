"""Facts about Gemma 3n with its towers."""
