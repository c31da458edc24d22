"""A compensation desk for delayed flights, on real data: the example, the demo and the tutorial."""
