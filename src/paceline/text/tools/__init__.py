"""Tool calls as models write them: one table of formats, read by a scanner and by a grammar writer."""
