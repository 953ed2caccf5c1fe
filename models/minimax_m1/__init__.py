"""Facts about MiniMax-M1 with its own code; taken to be built as MiniMax-Text-01."""
