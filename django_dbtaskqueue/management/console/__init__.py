"""The subcommands of ``taskqueue``."""
