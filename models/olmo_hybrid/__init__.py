"""Facts about OLMo hybrid."""
