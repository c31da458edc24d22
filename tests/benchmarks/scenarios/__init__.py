"""What is measured; each module is one scenario with its cases and the targets it has to meet."""
