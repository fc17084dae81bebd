"""`paceline chat`: a conversation on the terminal."""
