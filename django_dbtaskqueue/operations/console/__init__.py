"""What ``manage.py taskqueue`` says and does; the command itself only parses."""
