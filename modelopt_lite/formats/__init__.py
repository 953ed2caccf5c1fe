"""Number formats: one module each, pure functions on tensors, on any device."""
