"""Facts about NeMo SpeechLM."""
