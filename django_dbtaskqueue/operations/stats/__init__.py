"""Statistics that the admin, the command line and the API show."""
