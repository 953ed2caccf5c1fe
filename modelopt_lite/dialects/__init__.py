"""Dialects: how an export names, shapes and describes the tensors of quantized matrices."""
