"""Work that ends in every way a task can end."""
