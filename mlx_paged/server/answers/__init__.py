"""What an answer says, told apart as it comes, and answers that are kept for the next turn."""
