"""Facts about MiniMax-M3."""
