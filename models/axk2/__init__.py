"""Facts about A.X K2."""
