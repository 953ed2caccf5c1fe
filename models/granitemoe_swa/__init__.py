"""Facts about Granite MoE with sliding windows.."""
