"""The policy: every dtype that a model is trained with, as decided by C, frozen."""
