"""Users: what they usually do, clusters, drift, new shapes of requests, and feedback."""

from regard.watch.users.level import UserLevel

__all__ = ["UserLevel"]
