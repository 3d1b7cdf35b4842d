"""What data says about weights: texts counted, gradients and activations summed while a model runs."""
