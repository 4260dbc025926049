"""Our own pickle machine: reads protocols 0 to 5 into inert records and writes protocol 2. Runs and imports nothing."""
