"""Facts about Nemotron-H Omni."""
