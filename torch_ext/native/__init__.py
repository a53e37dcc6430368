"""The C library: how it is found, its constants, structs and operators as Python sees them."""
