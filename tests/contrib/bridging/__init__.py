"""Two systems with a bridge between them: the settings, tasks and server of processes, and a proxy that loses messages.

``localhost.pem`` is a certificate with its key. It is for these tests alone and guards nothing.
"""
