"""What K/V take, lose and survive: formats, windows, files, restarts."""
