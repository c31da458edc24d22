"""The processes of ``runtaskpoller``: supervisor, children, shutdown, screen."""
