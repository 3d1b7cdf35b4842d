"""Statistics of weights: token counts of texts, and sums of gradients and activations while a model runs."""
