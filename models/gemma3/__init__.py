"""Gemma 3 with its vision tower."""
