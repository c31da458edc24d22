"""An application as a user of the package has it, for tests."""
