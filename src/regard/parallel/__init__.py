"""One sequence on several processes: each holds a slice of the tokens, and what others need of it is sent to them."""

from regard.parallel.sequence import add_gradients, mine, sequence
from regard.parallel.wire import Traffic, counted

__all__ = ["Traffic", "add_gradients", "counted", "mine", "sequence"]
