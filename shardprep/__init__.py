"""What the packages of this project share: errors, files that appear whole, and the format on disk."""
