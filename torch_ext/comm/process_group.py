"""What a process group of torch.distributed says of itself: its back end and its time-out."""
