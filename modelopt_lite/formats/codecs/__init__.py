"""How each family of number formats keeps matrices: quantize, dequantize, shapes, error bounds."""
