"""A PostgreSQL server for development and tests, from a wheel or from PATH."""
