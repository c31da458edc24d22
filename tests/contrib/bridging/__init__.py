"""The receiving side of a bridge: its URLs and HTTPS servers.

``localhost.pem`` is a certificate with its key. It is for these tests alone and guards nothing.
"""
