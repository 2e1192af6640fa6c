"""What a client can work out about the others from what it received."""
