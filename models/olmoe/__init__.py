"""Facts about OLMoE."""
