"""Communicators: they move bytes between ranks and decide nothing."""
