"""`paceline run-batch`: a file of requests, without a server."""
