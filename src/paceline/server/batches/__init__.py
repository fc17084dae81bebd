"""Files that clients leave here, and batches of requests that are answered when no other request waits."""
