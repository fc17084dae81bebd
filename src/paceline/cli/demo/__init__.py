"""`paceline demo`: the same requests under three batching modes."""
