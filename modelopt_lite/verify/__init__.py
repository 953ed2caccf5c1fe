"""Check a written checkpoint: its files, tensors and configs, and how far it is from its source."""

from __future__ import annotations
