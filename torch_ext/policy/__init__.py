"""Which dtype everything has: the C loader's policy, frozen."""
