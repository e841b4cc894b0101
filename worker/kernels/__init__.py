"""One op per file: a launcher and a torch reference of the same signature."""
