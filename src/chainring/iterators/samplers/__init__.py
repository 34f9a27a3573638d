"""Order samplers: which example comes when in an epoch, other than by shuffling.

Each is called with (seed, epoch, size) and returns the indices of a whole epoch, a pure function of these. There is no state
to save, and a run continues in the middle of an epoch as it does without a sampler.
"""

from chainring.iterators.samplers.bucket import BucketOrderSampler
from chainring.iterators.samplers.no_repeat import NoRepeatOrderSampler
from chainring.iterators.samplers.weighted import WeightedOrderSampler

__all__ = ["BucketOrderSampler", "NoRepeatOrderSampler", "WeightedOrderSampler"]
