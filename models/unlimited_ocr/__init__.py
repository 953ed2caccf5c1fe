"""Facts about Unlimited-OCR."""
