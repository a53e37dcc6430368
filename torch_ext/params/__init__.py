"""Parameters: their groups and names, and which part of each lies on this rank."""
