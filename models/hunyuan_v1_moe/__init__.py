"""Facts about Hunyuan V1 MoE."""
