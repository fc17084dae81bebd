"""Files that clients leave here, and batches of requests that are answered when nobody else waits."""
