"""What is done with each of the two lists before they are compared."""
