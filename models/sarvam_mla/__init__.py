"""Facts about Sarvam with latent attention."""
