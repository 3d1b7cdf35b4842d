"""Tasks with labels: their examples, batches and scores."""
