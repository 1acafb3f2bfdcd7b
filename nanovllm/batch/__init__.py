"""Jobs over many prompts."""
