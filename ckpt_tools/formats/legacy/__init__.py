"""What PyTorch wrote before 1.6."""
