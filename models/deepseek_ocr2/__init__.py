"""Facts about DeepSeek-OCR 2."""
