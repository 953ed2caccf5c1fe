"""Facts about VaultGemma."""
