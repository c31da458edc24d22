"""The project's settings, a queue's settings, and what operators change at run time."""
