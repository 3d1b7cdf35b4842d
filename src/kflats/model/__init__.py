"""The weights of a model: found, taken out, put back in another form, and described for whoever loads them."""
