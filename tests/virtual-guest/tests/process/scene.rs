//! A daemon with NICs for processes, and how they are looked at from outside.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use virtual_guest::daemon::DaemonOptions;
use virtual_guest::guest::{Error, Result};
use virtual_guest::world::{Node, World, ipv4_gid};

/// Two NICs of one network: `blue` and `red`, the NICs' last octets their numbers.
pub(crate) struct Scene {
    pub world: World,
    blue: PathBuf,
    red: PathBuf,
}

impl Scene {
    pub(crate) fn new() -> Self {
        Self::with(&[])
    }

    /// With options of `nic add` for `blue`.
    pub(crate) fn with(options: &[&str]) -> Self {
        let world = World::with(&DaemonOptions::default(), Duration::from_secs(180));
        let add = |name: &str, address: &str, more: &[&str]| {
            world.daemon.add_process_nic(name, "net", &[&["--address", address], more].concat())
        };
        let blue = add("blue", "10.0.9.1", options);
        let red = add("red", "10.0.9.2", &[]);
        Self { world, blue, red }
    }

    pub(crate) fn blue_socket(&self) -> &std::path::Path {
        &self.blue
    }

    /// Another process at the NIC.
    pub(crate) fn blue(&self) -> Node {
        Node::process("blue", &self.blue, ipv4_gid(9, 1))
    }

    /// Another process at the other NIC.
    pub(crate) fn red(&self) -> Node {
        Node::process("red", &self.red, ipv4_gid(9, 2))
    }

    /// What the daemon says of the objects of a NIC.
    pub(crate) fn objects(&self, nic: &str) -> serde_json::Value {
        self.world.daemon.show_nic(nic)["objects"].clone()
    }

    /// Waits until nothing is left of the processes of a NIC.
    #[track_caller]
    pub(crate) fn awaits_nothing(&self, nic: &str) {
        let begin = Instant::now();
        loop {
            let left = self.objects(nic);
            let objects = left.as_object().unwrap();
            let kinds = objects.iter().filter(|(kind, _)| *kind != "kept_bytes");
            if kinds.clone().all(|(_, count)| count == 0) && objects.len() > 8 {
                return;
            }
            assert!(begin.elapsed() < Duration::from_secs(20), "left: {left}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

/// The status that something was refused with.
#[track_caller]
pub(crate) fn status<T: std::fmt::Debug>(result: Result<T>) -> u32 {
    match result {
        Err(Error::Status { status, .. }) => status,
        other => panic!("not a status: {other:?}"),
    }
}
