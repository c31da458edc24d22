"""The archive of finished tasks as Parquet files."""
