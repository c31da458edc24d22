"""The search text of lists, commands and the API: parsing, values, query, windows."""
