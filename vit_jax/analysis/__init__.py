"""What is read off run folders after training."""
