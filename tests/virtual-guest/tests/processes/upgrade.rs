//! The daemon becomes another program: `vhost-rdma upgrade`.

use std::io::{Read as _, Write as _};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, Signal, kill_process};

use serde_json::Value;
use virtual_guest::daemon::{Daemon, DaemonOptions, binary, patience};
use virtual_guest::guest::{Guest, GuestConfig};
use virtual_guest::world::{Node, World};

use super::{eventually, node, pair, processes, replace, replace_supervisor, start_anew};
use super::{told_that_it_is_lost, under_traffic, writes};

fn world(kept: bool) -> World {
    let options =
        DaemonOptions { processes: true, installed: true, kept, ..DaemonOptions::default() };
    let world = World::with(&options, Duration::from_secs(120));
    world.daemon.add_network("red", 200);
    world
}

fn program() -> Vec<u8> {
    std::fs::read(binary()).expect("the program")
}

/// Upgrades to a new file; what is said of it.
pub(super) fn upgrade(daemon: &Daemon) -> Value {
    daemon.install(&program());
    let (pid, before) = (daemon.supervisor(), processes(daemon));
    let said = daemon.run(&["upgrade", "--json"]);
    assert_eq!(daemon.supervisor(), pid, "it is the same process");
    assert!(processes(daemon).values().all(|pid| !before.values().any(|old| old == pid)));
    serde_json::from_str(&said).expect("JSON")
}

/// Longer than a daemon that becomes another program waits for its last answers to go.
const SLOW: Duration = Duration::from_secs(3);

/// Brings the daemon's answers to one client late, and not at all if the daemon has hung up by
/// then: what a client sees of a daemon that has too much to do.
fn bring_late(client: &UnixStream, daemon: &Path) -> std::io::Result<()> {
    let server = UnixStream::connect(daemon)?;
    let (mut asks, mut asked) = (client.try_clone()?, server.try_clone()?);
    std::thread::spawn(move || std::io::copy(&mut asks, &mut asked));
    let (mut answers, mut answered, mut bytes) = (&server, client, [0; 4096]);
    loop {
        let len = answers.read(&mut bytes)?;
        std::thread::sleep(SLOW);
        let mut polled = [PollFd::new(&server, PollFlags::empty())];
        poll(&mut polled, Some(&Timespec::default()))?;
        if len == 0 || polled[0].revents().contains(PollFlags::HUP) {
            return client.shutdown(Shutdown::Both);
        }
        answered.write_all(&bytes[..len])?;
    }
}

/// The daemon goes on whether its answer arrived or not, so the command does too.
#[test]
fn an_upgrade_whose_answer_is_lost_is_told_of_by_the_next_program() {
    let world = world(false);
    let (a, b) = (node(&world, "net"), node(&world, "net"));
    let mut ends = pair(&a, &b);
    let socket = world.daemon.dir().join("slow.sock");
    let listener = UnixListener::bind(&socket).expect("a socket");
    let daemon = world.daemon.admin_socket();
    std::thread::spawn(move || {
        for client in listener.incoming().flatten() {
            let daemon = daemon.clone();
            std::thread::spawn(move || bring_late(&client, &daemon));
        }
    });
    world.daemon.install(&program());
    let said = world.daemon.cli_by(&socket, &["upgrade", "--json"]);
    let said: Value = serde_json::from_str(&said.expect("it goes on")).expect("JSON");
    assert_eq!((&said["ready_before"], &said["ready"]), (&2.into(), &2.into()), "{said}");
    assert!(world.daemon.log().contains("becoming another program"));
    writes(&mut ends, 1);
}

/// Each process is called as the program is, however it was executed.
fn are_called_as_the_program(daemon: &Daemon) {
    for pid in daemon.pids() {
        let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
        assert_eq!(name, "vhost-rdma\n", "process {pid}");
    }
}

fn lives_through_upgrades(world: &World) {
    let nodes = ["net", "net", "red", "red"].map(|network| node(world, network));
    are_called_as_the_program(&world.daemon);
    let (mut here, mut there) = (pair(&nodes[0], &nodes[1]), pair(&nodes[2], &nodes[3]));
    let (longest, _) = under_traffic(&mut here, |sent| {
        under_traffic(&mut there, |_| {
            for _ in 0..3 {
                let said = upgrade(&world.daemon);
                assert_eq!(
                    (&said["ready_before"], &said["ready"]),
                    (&4.into(), &4.into()),
                    "{said}"
                );
                let (pause, ms) = (&said["pause_us"], &said["ms"]);
                let (pause, ms) = (pause.as_u64().expect("a pause"), ms.as_u64().expect("all"));
                assert!(pause > 0 && pause < (ms + 1) * 1000, "{said}");
                let before = sent.load(Ordering::Relaxed);
                eventually("nothing goes on", || sent.load(Ordering::Relaxed) > before + 20);
            }
        });
    });
    assert!(longest < Duration::from_secs(5) * patience(), "{longest:?}");
    for node in &nodes {
        assert_eq!(node.guest.async_event(Duration::ZERO).expect("its queue"), None);
        assert_eq!(world.daemon.show_nic(&node.name)["session"], "driver_ready");
    }
    are_called_as_the_program(&world.daemon);
    writes(&mut pair(&nodes[1], &nodes[0]), 3);
    writes(&mut here, 4);
    // The sockets are the next program's.
    nodes[3].guest.disconnect();
    let name = &nodes[3].name;
    eventually("the VMM is not gone", || world.daemon.show_nic(name)["session"] == "absent");
    let again = Guest::connect(&nodes[3].socket, GuestConfig::default()).expect("it gets in");
    let again = Node::start(name.clone(), nodes[3].socket.clone(), again, nodes[3].gid);
    writes(&mut pair(&again, &nodes[2]), 5);
    // What it took over dies and goes on like what it began itself.
    replace(&world.daemon, "net");
    told_that_it_is_lost(&nodes[0].guest);
    let anew = start_anew(&nodes[0]);
    writes(&mut pair(&anew, &anew), 6);
}

#[test]
fn queue_pairs_live_on_under_another_program() {
    lives_through_upgrades(&world(false));
}

#[test]
fn queue_pairs_live_on_under_another_program_of_a_daemon_that_is_kept() {
    let world = world(true);
    lives_through_upgrades(&world);
    let (a, b) = (node(&world, "net"), node(&world, "net"));
    upgrade(&world.daemon);
    // What the parent keeps is the present program's.
    replace_supervisor(&world.daemon);
    told_that_it_is_lost(&a.guest);
    told_that_it_is_lost(&b.guest);
    let (a, b) = (start_anew(&a), start_anew(&b));
    writes(&mut pair(&a, &b), 7);
}

#[test]
fn nothing_happens_where_there_is_no_program_of_ours() {
    let world = world(false);
    let (a, b) = (node(&world, "net"), node(&world, "net"));
    let mut ends = pair(&a, &b);
    let before = processes(&world.daemon);
    for (program, why) in [
        ("#!/bin/sh\necho frobnicate 1.0\n", "it says"),
        ("#!/bin/sh\nexit 3\n", "ends with"),
        ("#!/bin/sh\nexec sleep 60\n", "does not say its version"),
        ("no program at all", "is no vhost-rdma"),
    ] {
        world.daemon.install(program.as_bytes());
        let refused = world.daemon.cli(&["upgrade"]).expect_err("it is none");
        assert!(refused.contains(why) && refused.contains("install one"), "{refused}");
        writes(&mut ends, 1);
    }
    assert_eq!(processes(&world.daemon), before);
    // A package that is whole again.
    upgrade(&world.daemon);
    writes(&mut ends, 2);
}

#[test]
fn what_would_be_lost_is_said_first() {
    let options = DaemonOptions { processes: true, ..DaemonOptions::default() };
    let world = World::with(&options, Duration::from_secs(60));
    let a = node(&world, "net");
    let refused = world.daemon.cli(&["upgrade"]).expect_err("it forgets its NICs");
    assert!(refused.contains("ephemeral") && refused.contains(&a.name), "{refused}");

    let args = vec!["--one-process".to_owned()];
    let options = DaemonOptions { args, installed: true, ..DaemonOptions::default() };
    let world = World::with(&options, Duration::from_secs(60));
    let a = node(&world, "net");
    let refused = world.daemon.cli(&["upgrade"]).expect_err("its guest would lose its device");
    assert!(refused.contains(&a.name) && refused.contains("--force"), "{refused}");
    writes(&mut pair(&a, &a), 1);
}

/// A build that reads other saved state has its say before the guests feel it.
#[test]
fn a_program_that_cannot_read_what_this_one_saves_is_refused() {
    let world = world(false);
    let a = node(&world, "net");
    let mut ends = pair(&a, &a);
    let other = "#!/bin/sh\ncase \"$*\" in *--check*) echo 'it would start, and reads saved state \
                 of version 999.9'; exit;; esac\n";
    let other = format!("{other}exec {} \"$@\"\n", binary().display());
    world.daemon.install(other.as_bytes());
    let before = processes(&world.daemon);
    let refused = world.daemon.cli(&["upgrade"]).expect_err("guests would lose their devices");
    for word in ["version 999.9", &a.name, "--force"] {
        assert!(refused.contains(word), "{refused}");
    }
    assert_eq!(processes(&world.daemon), before);
    writes(&mut ends, 1);
    let said = world.daemon.cli(&["upgrade", "--json", "--force"]).expect("as was asked");
    let said: Value = serde_json::from_str(&said).expect("JSON");
    assert_eq!(said["lost"], serde_json::json!([a.name]), "{said}");
}

/// A daemon with a configuration file, and the directory that it is in.
fn with_a_file() -> (tempfile::TempDir, std::path::PathBuf, World) {
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("config.toml");
    std::fs::write(&file, "poll_us = 10\n").expect("a file");
    let args = vec!["--config".to_owned(), file.display().to_string()];
    let options = DaemonOptions { processes: true, installed: true, args, ..Default::default() };
    let world = World::with(&options, Duration::from_secs(120));
    (dir, file, world)
}

/// What is wrong with the file is known while there is a program that goes on.
#[test]
fn an_upgrade_to_a_daemon_that_would_not_start_is_refused() {
    let (_dir, file, world) = with_a_file();
    let (a, b) = (node(&world, "net"), node(&world, "net"));
    let mut ends = pair(&a, &b);
    let before = processes(&world.daemon);
    let mac = world.daemon.show_nic(&a.name)["mac"].as_str().expect("a MAC address").to_owned();
    let twice = format!("[[nics]]\nname = \"c\"\nnetwork = \"net\"\nmac = \"{mac}\"\n");
    world.daemon.install(&program());
    for (text, why) in [
        ("frobnicate = 1\n", "frobnicate"),
        ("[admin]\nowner = \"nobody-of-this-name\"\n", "nobody-of-this-name"),
        // Another NIC has the MAC address, which is in the state that is saved.
        (&*twice, "MAC"),
    ] {
        std::fs::write(&file, text).expect("a file");
        let refused = world.daemon.cli(&["upgrade"]).expect_err("it would not start");
        assert!(refused.contains(why) && refused.contains("would not start"), "{refused}");
        writes(&mut ends, 1);
    }
    assert_eq!(processes(&world.daemon), before);
    std::fs::write(&file, "poll_us = 11\n").expect("a file");
    upgrade(&world.daemon);
    writes(&mut ends, 2);
}

/// The socket of a NIC for processes is where pods were told, whatever becomes of the daemon.
#[test]
fn the_socket_of_a_nic_for_processes_stays_where_it_is() {
    let kept = super::kept();
    let installed = world(false);
    let socket = |world: &World| world.daemon.add_process_nic("p", "net", &[]);
    let works = |path: &Path| Node::process("p", path, [0; 16]).guest.works();
    for (world, next) in [
        (&kept, &(|world: &World| replace_supervisor(&world.daemon)) as &dyn Fn(&World)),
        (&installed, &|world| {
            world.daemon.install(&program());
            world.daemon.run(&["upgrade", "--force"]);
        }),
    ] {
        let path = socket(world);
        assert!(path.ends_with("process.sock"), "{path:?}");
        works(&path);
        next(world);
        works(&path);
        // It is where the daemon says, too.
        let shown = world.daemon.show_nic("p")["socket"].clone();
        assert_eq!(shown, path.display().to_string());
        world.daemon.run(&["reload"]);
        works(&path);
    }
}

/// The process dies while it comes to rest, has died and is away, or the next one is just being
/// started, when the daemon becomes another program. Its guests lose their devices, as by any death
/// of it, and no VMM its connection.
#[test]
fn a_process_that_dies_in_an_upgrade_costs_no_vmm_its_connection() {
    let world = world(false);
    let daemon = &world.daemon;
    let mut nodes = ["net", "net"].map(|network| node(&world, network));
    // The first death of a process costs a tenth of a second; what an upgrade takes before guests
    // stand still depends on the machine.
    for before in (0..5).map(|n| Duration::from_millis(n * 40)) {
        writes(&mut pair(&nodes[0], &nodes[1]), 1);
        daemon.install(&program());
        let begun = daemon.log().matches("becoming another program").count();
        std::thread::scope(|scope| {
            let upgrading = scope.spawn(|| daemon.cli(&["upgrade", "--json"]));
            if before.is_zero() {
                let is_begun = || daemon.log().matches("becoming another program").count() > begun;
                eventually("it does not begin", is_begun);
            } else {
                // Or before it has looked at the new one.
                std::thread::sleep(before);
            }
            if let Some(pid) = processes(daemon).get("net") {
                // It may have ended by itself.
                let _ = kill_process(Pid::from_raw(pid.cast_signed()).unwrap(), Signal::KILL);
            }
            // Who lost a device is not ready again, which it says.
            println!("{before:?}: {:?}", upgrading.join().expect("no panic"));
        });
        for node in &mut nodes {
            let name = &node.name;
            eventually("its connection is lost", || {
                let shown = daemon.show_nic(name);
                shown["session"] == "connected" || shown["session"] == "driver_ready"
            });
            *node = start_anew(node);
        }
    }
}

/// A full disk, for one. What stands in its place here cannot be written to by root either.
#[test]
fn a_state_that_cannot_be_saved_costs_no_guest_its_device() {
    let (_dir, file, world) = with_a_file();
    let (a, b) = (node(&world, "net"), node(&world, "net"));
    let mut ends = pair(&a, &b);
    let in_its_place = world.daemon.dir().join("state.json.new");
    std::fs::create_dir(&in_its_place).expect("a directory");
    upgrade(&world.daemon);
    writes(&mut ends, 1);
    // Nor where there would be something to save.
    std::fs::write(&file, "[[networks]]\nname = \"late\"\nvni = 77\n").expect("a file");
    upgrade(&world.daemon);
    writes(&mut ends, 2);
    assert!(world.daemon.run(&["network", "list"]).contains("late"));
    assert!(world.daemon.log().contains("the state stays as it was saved"));
    let add = || world.daemon.cli(&["network", "add", "blue"]);
    let refused = add().expect_err("it would be forgotten");
    assert!(refused.contains("state file"), "{refused}");
    std::fs::remove_dir(&in_its_place).expect("it is empty");
    add().expect("there is room again");
    let saved = std::fs::read_to_string(world.daemon.dir().join("state.json")).expect("its state");
    assert!(saved.contains("late") && saved.contains("blue"), "{saved}");
}
