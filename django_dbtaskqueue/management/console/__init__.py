"""What the ``taskqueue`` command prints and does."""
