"""A flight-delay compensation desk: the queue on the 336,776 real departures from New York in 2013."""
