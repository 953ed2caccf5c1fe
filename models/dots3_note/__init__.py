"""Facts about dots3 note with its vision and audio towers."""
