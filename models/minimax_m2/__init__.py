"""Facts about MiniMax-M2."""
