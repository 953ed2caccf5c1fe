"""Facts about Granite MoE with a shared MLP."""
