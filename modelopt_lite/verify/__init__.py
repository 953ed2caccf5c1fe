"""Check a written checkpoint: its files, its tensors, its configs, and how far it is from its source."""

from __future__ import annotations
