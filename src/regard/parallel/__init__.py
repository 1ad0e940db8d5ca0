"""Sequence parallelism: one sequence on several processes, each with a slice of the tokens."""

from regard.parallel.communication import Traffic, count_traffic
from regard.parallel.sharded_mixer import all_reduce_gradients, local_slice, sequence_parallel

__all__ = ["Traffic", "all_reduce_gradients", "count_traffic", "local_slice", "sequence_parallel"]
