"""What turns one op into a callable."""
