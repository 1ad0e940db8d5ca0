"""Running for good: read events from a stream, score them, and keep alerts and states on disk."""
