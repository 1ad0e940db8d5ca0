"""The triage page: its files, and who may see them."""
