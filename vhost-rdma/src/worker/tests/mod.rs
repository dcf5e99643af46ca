//! Tests of files that the models run too, on other primitives.

mod mailbox;
mod reply;
mod shard_thread;
mod waker;
