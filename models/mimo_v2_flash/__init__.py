"""Facts about MiMo-V2-Flash."""
