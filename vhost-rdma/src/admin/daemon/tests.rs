//! The daemon's promise: a change holds in registry, state and device layer, or in none of them.

use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};

use super::{Daemon, Error};
use crate::config::File;
use crate::node::{
    self, AttachError, Backend, LimitsPatch, NicConfig, NicPatch, NicSpec, NicStatus, NullBackend,
    Session,
};

/// Refuses when it is told to, and else remembers.
#[derive(Debug, Default)]
struct Moody {
    inner: NullBackend,
    refuse: AtomicBool,
}

impl Moody {
    fn ask(&self) -> Result<(), AttachError> {
        if self.refuse.load(Ordering::Relaxed) {
            Err(AttachError::Resources("not today".to_owned()))
        } else {
            Ok(())
        }
    }
}

impl Backend for Moody {
    fn attach(&self, nic: &NicConfig) -> Result<(), AttachError> {
        self.ask().and_then(|()| self.inner.attach(nic))
    }

    fn detach(&self, name: &str) {
        self.inner.detach(name);
    }

    fn update(&self, nic: &NicConfig) -> Result<(), AttachError> {
        self.ask().and_then(|()| self.inner.update(nic))
    }

    fn status(&self, name: &str) -> NicStatus {
        self.inner.status(name)
    }
}

fn start(dir: &Path, file: &str) -> Result<Daemon<Moody>, Error> {
    Daemon::start(dir, false, &toml::from_str(file).unwrap(), Moody::default())
}

fn spec(name: &str) -> NicSpec {
    NicSpec { name: name.to_owned(), ..NicSpec::default() }
}

#[test]
fn a_nic_that_the_device_layer_refuses_leaves_nothing_behind() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = start(dir.path(), "").unwrap();
    daemon.backend.refuse.store(true, Ordering::Relaxed);
    assert!(daemon.add_nic(spec("a")).unwrap_err().to_string().contains("not today"));
    assert!(matches!(daemon.nic("a"), Err(Error::Node(node::Error::NoSuchNic { .. }))));
    assert!(!dir.path().join("nics/a").exists());
    daemon.backend.refuse.store(false, Ordering::Relaxed);
    daemon.add_nic(spec("a")).unwrap();
}

#[test]
fn a_refused_update_leaves_the_old_values_everywhere() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = start(dir.path(), "").unwrap();
    let old = daemon.add_nic(spec("a")).unwrap().config;
    let limits = LimitsPatch { max_qps: Some(3), ..LimitsPatch::default() };
    daemon.backend.refuse.store(true, Ordering::Relaxed);
    assert!(daemon.update_nic("a", NicPatch { limits, ..NicPatch::default() }).is_err());
    assert_eq!(daemon.nic("a").unwrap().config, old);
    assert_eq!(daemon.backend.inner.config("a"), Some(old));
    daemon.backend.refuse.store(false, Ordering::Relaxed);
    daemon.update_nic("a", NicPatch { limits, ..NicPatch::default() }).unwrap();
    assert_eq!(daemon.backend.inner.config("a").map(|nic| nic.limits.max_qps), Some(3));
}

#[test]
fn state_that_cannot_be_written_undoes_the_change() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = start(dir.path(), "").unwrap();
    daemon.add_nic(spec("kept")).unwrap();
    // A directory in the place of the new file makes the write fail for root too.
    std::fs::create_dir(dir.path().join("state.json.new")).unwrap();
    assert!(matches!(daemon.add_nic(spec("a")), Err(Error::Store(_))));
    assert!(daemon.nic("a").is_err());
    assert_eq!(daemon.backend.inner.config("a"), None);
    assert!(matches!(daemon.remove_nic("kept"), Err(Error::Store(_))));
    assert!(daemon.nic("kept").is_ok());
    assert!(matches!(daemon.add_network("n", None), Err(Error::Store(_))));
    assert_eq!(daemon.networks().len(), 1);
}

#[test]
fn a_restart_brings_back_what_was_added_and_changed() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = start(dir.path(), "").unwrap();
    daemon.add_network("blue", Some(99)).unwrap();
    daemon.add_nic(NicSpec { network: Some("blue".to_owned()), ..spec("a") }).unwrap();
    daemon.add_nic(spec("gone")).unwrap();
    let limits = LimitsPatch { max_mrs: Some(5), ..LimitsPatch::default() };
    let before = daemon.update_nic("a", NicPatch { limits, ..NicPatch::default() }).unwrap().config;
    daemon.remove_nic("gone").unwrap();
    let inode = |name: &str| dir.path().join(name).metadata().ok().map(|metadata| metadata.ino());
    let mounted = inode("nics/a");
    daemon.stop();
    drop(daemon);
    let daemon = start(dir.path(), "").unwrap();
    // A container that has it mounted goes on seeing it.
    assert!(mounted.is_some() && mounted == inode("nics/a"));
    assert_eq!(inode("nics/gone"), None);
    assert_eq!(daemon.nic("a").unwrap().config, before);
    assert_eq!(daemon.backend.inner.config("a"), Some(before));
    assert_eq!(daemon.nics(None).unwrap().len(), 1);
    assert_eq!(
        daemon.networks().into_iter().find(|(n, _)| n.name == "blue").map(|(n, c)| (n.vni, c)),
        Some((99, 1))
    );
}

#[test]
fn the_file_wins_over_the_state_but_keeps_what_guests_have_seen() {
    const FILE: &str =
        "[[networks]]\nname='blue'\n[[nics]]\nname='a'\nnetwork='blue'\nlimits={max_qps=9}";
    let dir = tempfile::tempdir().unwrap();
    let daemon = start(dir.path(), FILE).unwrap();
    let first = daemon.nic("a").unwrap().config;
    assert!(first.configured);
    let limits = LimitsPatch { max_qps: Some(1), ..LimitsPatch::default() };
    daemon.update_nic("a", NicPatch { limits, ..NicPatch::default() }).unwrap();
    daemon.add_nic(spec("b")).unwrap();
    drop(daemon);
    let daemon = start(dir.path(), FILE).unwrap();
    assert_eq!(daemon.nic("a").unwrap().config, first);
    assert!(!daemon.nic("b").unwrap().config.configured);
    drop(daemon);
    let daemon = start(dir.path(), "").unwrap();
    assert!(!daemon.nic("a").unwrap().config.configured);
    drop(daemon);
    let error = start(dir.path(), "[[networks]]\nname='blue'\nvni=1").unwrap_err().to_string();
    assert!(error.contains("network \"blue\"") && error.contains("VNI 1"), "{error}");
}

#[test]
fn a_nic_that_cannot_be_served_at_start_is_failed_and_the_others_run() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = start(dir.path(), "").unwrap();
    daemon.add_nic(spec("a")).unwrap();
    daemon.add_nic(spec("b")).unwrap();
    daemon.stop();
    drop(daemon);
    std::fs::remove_dir(dir.path().join("nics/a")).unwrap();
    std::fs::write(dir.path().join("nics/a"), "in the way").unwrap();
    let daemon = start(dir.path(), "").unwrap();
    let failed = daemon.nic("a").unwrap().status;
    assert_eq!(failed.session, Session::Failed);
    assert!(failed.error.is_some_and(|error| error.contains("nics/a")));
    assert_eq!(daemon.nic("b").unwrap().status.session, Session::Absent);
    daemon.remove_nic("a").unwrap();
    assert_eq!(daemon.backend.inner.config("a"), None);
}

#[test]
fn an_ephemeral_daemon_forgets() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = Daemon::start(dir.path(), true, &File::default(), Moody::default()).unwrap();
    daemon.add_nic(spec("a")).unwrap();
    drop(daemon);
    assert_eq!(start(dir.path(), "").unwrap().nics(None).unwrap().len(), 0);
}

/// Takes its time to let go, until it is told to hurry.
#[derive(Debug)]
struct Slow {
    inner: NullBackend,
    detaching: Barrier,
    go_on: Barrier,
}

impl Backend for Slow {
    fn attach(&self, nic: &NicConfig) -> Result<(), AttachError> {
        self.inner.attach(nic)
    }

    fn detach(&self, name: &str) {
        self.detaching.wait();
        self.go_on.wait();
        self.inner.detach(name);
    }

    fn update(&self, nic: &NicConfig) -> Result<(), AttachError> {
        self.inner.update(nic)
    }

    fn status(&self, name: &str) -> NicStatus {
        self.inner.status(name)
    }
}

#[test]
fn looking_does_not_wait_for_a_nic_that_takes_its_time_to_stop() {
    let dir = tempfile::tempdir().unwrap();
    let slow =
        Slow { inner: NullBackend::default(), detaching: Barrier::new(2), go_on: Barrier::new(2) };
    let daemon = Daemon::start(dir.path(), true, &File::default(), slow).unwrap();
    daemon.add_nic(spec("a")).unwrap();
    daemon.add_nic(spec("b")).unwrap();
    std::thread::scope(|scope| {
        let removal = scope.spawn(|| daemon.remove_nic("a"));
        daemon.backend.detaching.wait();
        // With a lock held over the change these would hang here for ever.
        assert_eq!(daemon.nics(None).unwrap().len(), 1);
        assert!(daemon.nic("b").is_ok() && daemon.nic("a").is_err());
        daemon.backend.go_on.wait();
        removal.join().unwrap().unwrap();
    });
}
