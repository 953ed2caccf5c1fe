"""Facts about Llama-Nemotron (DeciLM)."""
