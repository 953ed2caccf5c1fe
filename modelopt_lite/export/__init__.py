"""What a finished layer becomes on disk, and the config files that describe it."""
