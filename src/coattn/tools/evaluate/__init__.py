"""What a method costs in quality, on a user's model and text."""
