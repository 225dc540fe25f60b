"""What callers never see: helpers of every room, below all of them but the errors."""
