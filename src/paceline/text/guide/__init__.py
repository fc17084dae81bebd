"""What an answer must look like, enforced token by token: grammars, their check, and the masks they allow."""
