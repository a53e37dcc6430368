"""Wire buckets: made just before a bucket travels, freed as soon as its sum is installed."""

import torch


class TemporaryBuckets:
    """At most one tensor per bucket at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tensors: dict[int, torch.Tensor] = {}

    def __len__(self) -> int:
        """How many have not been given back."""
        return len(self._tensors)

    def take(self, bucket: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """The bucket's tensor, uninitialised when it is made by this call.

        Raises RuntimeError where the bucket has one of another size or dtype: somebody still reads it.
        """
        tensor = self._tensors.get(bucket)
        if tensor is None:
            tensor = self._tensors[bucket] = torch.empty(numel, dtype=dtype, device=self._device)
        if tensor.numel() != numel or tensor.dtype != dtype:
            raise RuntimeError(
                f"bucket {bucket} has {tensor.numel()} elements of {tensor.dtype} in use; it cannot be had as "
                f"{numel} of {dtype} before it is given back"
            )
        return tensor

    def give_back(self, bucket: int) -> None:
        """Frees the bucket's tensor. Any thread."""
        self._tensors.pop(bucket, None)
