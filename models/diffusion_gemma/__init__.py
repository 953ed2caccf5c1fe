"""Facts about Diffusion Gemma."""
