"""What the pipeline learns from the history: report, quality, forecast."""
