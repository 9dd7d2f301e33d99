"""One replica process: an engine behind one gRPC endpoint, under a node agent's control."""
