"""The part of states and masters that lies on the host and is stepped there."""
