"""Published models: how their configurations and weights are named, family by family, and what they are in ours."""
