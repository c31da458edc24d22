"""The pull API: take tasks, settle and administer them without a poller."""
