"""Facts about SmolLM3."""
