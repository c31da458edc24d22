"""Counts and times of what processors did, for every minute and queue."""
