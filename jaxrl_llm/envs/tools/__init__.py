"""What a policy may call in the middle of a completion: text in, text out."""
