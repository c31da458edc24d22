"""The processes of ``runtaskpoller``: supervisor, children, shutdown, logs and the status line."""
