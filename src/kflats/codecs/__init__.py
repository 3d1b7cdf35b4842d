"""How a matrix's numbers are stored: the values that say so, and codes as files hold them."""
