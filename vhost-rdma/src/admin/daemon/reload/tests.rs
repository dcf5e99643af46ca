//! Networks that answer nothing are named, and hold up nobody else.

use std::path::Path;
use std::sync::Condvar;

use super::*;
use crate::node::{AttachError, LimitsPatch, NicPatch, NicSpec, NicStatus, NullBackend};

/// Answers nothing that concerns network "red" while it is silent.
#[derive(Debug, Default)]
struct Silent {
    inner: NullBackend,
    is: Mutex<bool>,
    changed: Condvar,
}

impl Silent {
    fn set(&self, silent: bool) {
        *self.is.lock().unwrap() = silent;
        self.changed.notify_all();
    }

    fn ask(&self, nic: &NicConfig) {
        let silent = |is: &mut bool| *is && nic.network == "red";
        drop(self.changed.wait_while(self.is.lock().unwrap(), silent).unwrap());
    }
}

impl Backend for Silent {
    fn attach(&self, nic: &NicConfig) -> Result<(), AttachError> {
        self.ask(nic);
        self.inner.attach(nic)
    }

    fn detach(&self, name: &str) {
        self.inner.detach(name);
    }

    fn update(&self, nic: &NicConfig) -> Result<(), AttachError> {
        self.ask(nic);
        self.inner.update(nic)
    }

    fn status(&self, name: &str) -> NicStatus {
        self.inner.status(name)
    }

    /// Whoever waits for a process finds its end.
    fn ending(&self) {
        self.set(false);
    }
}

/// Two networks with a NIC each, of so many QPs.
fn file(qps: u32) -> config::File {
    let network = |name: &str, nic: &str| {
        format!(
            "[[networks]]\nname='{name}'\n[[nics]]\nname='{nic}'\nnetwork='{name}'\n\
             limits={{max_qps={qps}}}\n"
        )
    };
    toml::from_str(&format!("{}{}", network("red", "a"), network("blue", "b"))).unwrap()
}

fn start(dir: &Path) -> Arc<Daemon<Silent>> {
    Arc::new(Daemon::start(dir, false, &file(5), Silent::default()).unwrap())
}

fn qps(daemon: &Daemon<Silent>, nic: &str) -> u32 {
    daemon.backend.inner.config(nic).map_or(0, |nic| nic.limits.max_qps)
}

fn set_qps(daemon: &Daemon<Silent>, nic: &str, qps: u32) {
    let limits = LimitsPatch { max_qps: Some(qps), ..LimitsPatch::default() };
    daemon.update_nic(nic, NicPatch { limits, ..NicPatch::default() }).unwrap();
}

fn eventually(what: &str, is: impl Fn() -> bool) {
    let begin = Instant::now();
    while !is() {
        assert!(begin.elapsed() < Duration::from_secs(20), "{what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_network_that_answers_nothing_is_named_and_no_other_waits_for_it() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = start(dir.path());
    daemon.backend.set(true);
    // Somebody changes it already, and waits.
    let (own, waits) = (daemon.clone(), Instant::now());
    let first = std::thread::spawn(move || set_qps(&own, "a", 6));
    eventually("it waits", || daemon.known().planned.nic("a").unwrap().limits.max_qps == 6);
    let own = daemon.clone();
    let reload = std::thread::spawn(move || own.reload(&file(7)).unwrap());
    eventually("the other network has it", || qps(&daemon, "b") == 7);
    // Nobody else's changes wait, while this one does.
    set_qps(&daemon, "b", 8);
    let spec = NicSpec { network: Some("blue".to_owned()), ..NicSpec::default() };
    daemon.add_nic(NicSpec { name: "c".to_owned(), ..spec }).unwrap();
    assert!(waits.elapsed() < PATIENCE, "{:?}", waits.elapsed());
    let done = reload.join().unwrap();
    assert_eq!(done.changed, ["NIC \"b\" changed"]);
    let said = done.failed.join("; ");
    assert!(done.failed.len() == 1 && said.contains("network \"red\" does not answer"), "{said}");
    assert!(!first.is_finished() && qps(&daemon, "a") == 5);
    // What it missed comes when it answers: who asked first goes first.
    daemon.backend.set(false);
    first.join().unwrap();
    eventually("it is told late", || {
        daemon.reload(&file(7)).unwrap();
        qps(&daemon, "a") == 7 && qps(&daemon, "b") == 7
    });
    assert_eq!(daemon.reload(&file(7)).unwrap(), Reloaded::default());
    assert_eq!(daemon.nic("a").unwrap().config.limits.max_qps, 7);
}

#[test]
fn what_somebody_is_about_to_make_is_theirs() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = start(dir.path());
    daemon.backend.set(true);
    let own = daemon.clone();
    let mac = Some("02:00:00:00:00:77".parse().unwrap());
    let network = Some("red".to_owned());
    let spec = NicSpec { name: "x".to_owned(), network, mac, ..NicSpec::default() };
    let making = std::thread::spawn(move || own.add_nic(spec).unwrap());
    eventually("it is on its way", || daemon.known().planned.nic("x").is_ok());
    let with = |nic: &str| -> config::File {
        let mut file = file(5);
        let more: config::File = toml::from_str(nic).unwrap();
        file.nics.extend(more.nics);
        file
    };
    for taken in [
        "[[nics]]\nname='x'\nnetwork='blue'\n",
        "[[nics]]\nname='y'\nnetwork='red'\nmac='02:00:00:00:00:77'\n",
    ] {
        let refused = daemon.reload(&with(taken)).unwrap_err().to_string();
        assert!(refused.contains('x'), "{refused}");
        assert_eq!(daemon.nics(None).unwrap().len(), 2, "nothing has changed");
    }
    daemon.backend.set(false);
    making.join().unwrap();
    // It is there, and the file does not name it.
    assert_eq!(daemon.reload(&file(5)).unwrap(), Reloaded::default());
    assert!(daemon.nic("x").is_ok());
}

#[test]
fn a_file_that_cannot_be_saved_changes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = start(dir.path());
    // A directory in the place of the new file makes the write fail for root too.
    std::fs::create_dir(dir.path().join("state.json.new")).unwrap();
    assert!(matches!(daemon.reload(&file(7)), Err(Error::Store(_))));
    assert_eq!((qps(&daemon, "a"), daemon.nic("a").unwrap().config.limits.max_qps), (5, 5));
    assert_eq!(daemon.known().planned.nic("a").unwrap().limits.max_qps, 5);
    std::fs::remove_dir(dir.path().join("state.json.new")).unwrap();
    assert_eq!(daemon.reload(&file(7)).unwrap().changed.len(), 2);
}

#[test]
fn the_end_waits_for_no_network_that_answers_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = start(dir.path());
    daemon.backend.set(true);
    let done = daemon.reload(&file(7)).unwrap();
    assert_eq!(done.failed.len(), 1);
    let begin = Instant::now();
    daemon.stop();
    assert!(begin.elapsed() < Duration::from_secs(5), "{:?}", begin.elapsed());
}
