"""States and masters that are stored on the host (offload_fraction), and their step there."""
