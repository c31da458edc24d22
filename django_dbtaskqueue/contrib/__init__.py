"""Optional parts: each needs an extra, may import everything, and is imported by nobody inside the package."""
