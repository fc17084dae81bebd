"""The step loop over the runner seam: plan, submit, wait, update."""
