"""Facts about OLMo 3."""
