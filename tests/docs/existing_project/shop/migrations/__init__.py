"""Tables of the shop."""
