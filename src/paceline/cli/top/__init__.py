"""`paceline top`: a running server in a terminal."""
