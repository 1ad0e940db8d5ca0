"""One sequence on several processes: each holds a slice of the tokens, and what others need of it is sent to them."""

from regard.parallel.communication import Traffic, count_traffic
from regard.parallel.sharded_mixer import all_reduce_gradients, local_slice, sequence_parallel

__all__ = ["Traffic", "all_reduce_gradients", "count_traffic", "local_slice", "sequence_parallel"]
