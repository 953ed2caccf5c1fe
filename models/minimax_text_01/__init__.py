"""Facts about MiniMax-Text-01 with its own code; in transformers it is minimax."""
