"""What a sample is: a whole document, a piece of one, or a row; and how its bytes become token ids."""
