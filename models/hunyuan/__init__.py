"""Facts about Hunyuan-Large with its own code; taken to be built as hunyuan_v1_moe."""
