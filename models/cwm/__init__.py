"""Facts about CWM."""
