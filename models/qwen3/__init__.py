"""Qwen3."""
