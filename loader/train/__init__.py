"""What training loops and frameworks use beside the loader."""
