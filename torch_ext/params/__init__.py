"""Parameters: their groups and names, and which part of each this rank holds."""
