"""Facts about A.X K1."""
