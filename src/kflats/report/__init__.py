"""What was done, for people: tables, pictures, pages and model cards."""
