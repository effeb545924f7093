"""Token shards: made, downloaded, checked, and read in order."""
