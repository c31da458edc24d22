"""The only package that speaks to a database connection."""
