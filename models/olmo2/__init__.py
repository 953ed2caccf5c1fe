"""Facts about OLMo 2."""
