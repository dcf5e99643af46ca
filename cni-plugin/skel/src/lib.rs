//! A skeleton for CNI plugins.
