"""Facts about ERNIE 4.5 VL with its own code; in transformers it is ernie4_5_vl_moe."""
