"""Facts about OpenAI privacy filter."""
