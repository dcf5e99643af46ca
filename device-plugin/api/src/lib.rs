//! What the CNI binary and the node agent say to each other.
