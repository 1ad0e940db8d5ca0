"""Models: a task made of blocks, and what is done with it."""
