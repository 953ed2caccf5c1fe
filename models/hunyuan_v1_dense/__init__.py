"""Facts about Hunyuan V1 (dense)."""
