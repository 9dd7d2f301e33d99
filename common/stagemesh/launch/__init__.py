"""A head and a node agent as child processes: what `stagemesh up` and `stagemesh.Mesh` share."""
