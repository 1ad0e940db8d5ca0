"""API security: what is normal in JSON events, and which key and value is not."""
