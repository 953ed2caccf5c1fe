"""What one rank of several does of a run, and what it learns from the others."""
