"""Facts about dots.llm1."""
