"""The vocabulary: columns, statements, leases, outcomes."""
