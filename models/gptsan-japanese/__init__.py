"""Facts about GPTSAN-japanese."""
