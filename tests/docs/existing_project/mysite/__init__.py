"""Somebody's site."""
