"""What has to be run on a Mac, with one command."""
