"""Callbacks of trainers that others write. These are imported when a callback is made, never before."""
