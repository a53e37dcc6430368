"""Bindings of the C library: finds and loads it, and mirrors its constants, structs and operators."""
