"""The demo's site with tasks for the docs' pictures: one that runs, a limited queue, a unique task, one of Django's."""
