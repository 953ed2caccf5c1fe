"""Facts about OLMo."""
