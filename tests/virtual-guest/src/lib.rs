//! Virtual guest.
