"""Communicators: send bytes between ranks and reduce them. What is sent, and when, is decided by their callers."""
