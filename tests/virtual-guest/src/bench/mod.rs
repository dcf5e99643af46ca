//! Pieces of the benchmarks.
