"""Facts about MiniMax-M3 with its vision tower."""
