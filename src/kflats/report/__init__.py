"""The report of a compression: tables, pictures, pages and model cards."""
