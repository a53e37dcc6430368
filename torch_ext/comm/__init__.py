"""Communicators: send bytes between ranks and reduce them. What is sent, and when, is decided by their callers."""

from torch_ext.comm import gloo_threads as _gloo_threads  # noqa: F401  # registers a function that runs at exit
