//! A network's process that dies while many NICs are under way to it.

use super::*;

/// NICs of the network.
const NICS: u32 = 400;

/// The process of this network, whoever started it.
fn process_of(network: &str) -> Option<u32> {
    let all = std::fs::read_dir("/proc").ok()?.flatten();
    all.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).find(|pid: &u32| {
        let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let words: Vec<&[u8]> = line.split(|byte| *byte == 0).collect();
        words.get(1..3) == Some(&[b"network-process", network.as_bytes()])
    })
}

#[test]
fn nics_that_go_down_with_their_process_are_there_in_the_next() {
    let network = format!("dies{}", std::process::id());
    let mut file = format!("[[networks]]\nname = \"{network}\"\nvni = 301\n");
    for n in 0..NICS {
        writeln!(file, "[[nics]]\nname = \"n{n}\"\nnetwork = \"{network}\"").unwrap();
    }
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("config.toml");
    std::fs::write(&path, file).expect("a file");
    let args = vec!["--config".to_owned(), path.display().to_string()];
    let options = DaemonOptions { processes: true, args, ..DaemonOptions::default() };
    let over = AtomicBool::new(false);
    let world = std::thread::scope(|scope| {
        let first = scope.spawn(|| {
            let first = loop {
                assert!(!over.load(Ordering::Relaxed), "it is not seen");
                match process_of(&network) {
                    Some(pid) => break pid,
                    None => std::thread::sleep(Duration::from_millis(1)),
                }
            };
            // It is shut in, and has some of the NICs.
            std::thread::sleep(Duration::from_millis(60) * patience());
            kill(first);
            first
        });
        let world = World::with(&options, Duration::from_secs(120));
        over.store(true, Ordering::Relaxed);
        let first = first.join().expect("it is seen");
        assert_ne!(process_of(&network), Some(first), "it was killed");
        world
    });
    let shown = |n: u32| world.daemon.show_nic(&format!("n{n}"));
    for n in 0..NICS {
        let nic = shown(n);
        assert_eq!((&nic["session"], &nic["error"]), (&"absent".into(), &().into()), "n{n}");
    }
    for n in [0, NICS / 8, NICS / 2, NICS - 1] {
        let socket = world.daemon.nic_socket(&format!("n{n}"));
        let guest = Guest::connect(&socket, virtual_guest::guest::GuestConfig::default());
        guest.expect("it gets in").init().expect("INIT");
    }
}
