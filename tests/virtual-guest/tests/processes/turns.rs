//! A network's process that answers nothing, as one that a guest took over may: changes of that
//! network wait for it, and those of others do not.

use super::*;

/// What waits for nobody may take so long.
const SOON: Duration = Duration::from_secs(3);

/// How long the process has to let go of a NIC while somebody waits for that.
const LET_GO: Duration = Duration::from_secs(2);

/// Stands still until it is dropped.
struct Stopped(Pid);

impl Stopped {
    fn new(pid: u32) -> Self {
        let pid = Pid::from_raw(pid.cast_signed()).expect("a process");
        kill_process(pid, Signal::STOP).expect("it is there");
        Self(pid)
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        let _ = kill_process(self.0, Signal::CONT);
    }
}

/// A call that is given up.
fn hangs_up(daemon: &Daemon, args: &[&str]) -> Child {
    let mut command = Command::new("timeout");
    command.arg("0.2").arg(virtual_guest::daemon::binary()).arg("--socket");
    command.arg(daemon.admin_socket()).args(args);
    command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("it is started")
}

#[test]
fn a_process_that_answers_nothing_holds_up_its_own_network_alone() {
    let world = world();
    let (a, b) = (node(&world, "net"), node(&world, "net"));
    let [c, d, e] = [(); 3].map(|()| node(&world, "red"));
    let mut ends = pair(&a, &b);
    e.guest.disconnect();
    let daemon = &world.daemon;
    let red = processes(daemon)["red"];
    let stopped = Stopped::new(red);
    let begin = Instant::now();
    std::thread::scope(|scope| {
        // Who removes a NIC waits a moment: it is gone, and the process lets go of it in its time.
        let removes = scope.spawn(|| {
            daemon.run(&["nic", "rm", &e.name]);
            begin.elapsed()
        });
        std::thread::sleep(Duration::from_millis(300));
        // It is on its way, and its name is taken until it is gone.
        match daemon.cli(&["nic", "add", &e.name, "--network", "net"]) {
            Err(taken) => assert!(taken.contains(&e.name), "{taken}"),
            // The machine was slower than that.
            Ok(_) => {
                assert!(removes.is_finished(), "its name is somebody else's already");
                daemon.run(&["nic", "rm", &e.name]);
            }
        }
        let mut slow =
            vec![scope.spawn(|| drop(daemon.run(&["nic", "add", "red-2", "--network", "red"])))];
        // More than there are threads for calls.
        let set = || drop(daemon.run(&["nic", "set", &d.name, "--max-qps", "9"]));
        slow.extend((0..20).map(|_| scope.spawn(set)));
        // And some whose clients do not wait so long: they come again and again.
        let mut gone: Vec<_> =
            (0..20).map(|_| hangs_up(daemon, &["nic", "set", &d.name, "--max-qps", "9"])).collect();
        std::thread::sleep(Duration::from_millis(300));
        let timed = |args: &[&str]| {
            let begin = Instant::now();
            daemon.run(args);
            let took = begin.elapsed();
            println!("{args:?}: {took:?}");
            assert!(took < SOON * patience(), "{args:?} took {took:?}");
        };
        timed(&["nic", "add", "other", "--network", "net"]);
        timed(&["nic", "set", "other", "--max-qps", "8"]);
        timed(&["network", "add", "blue"]);
        // The first of a network has its process started.
        timed(&["nic", "add", "first", "--network", "blue"]);
        timed(&["nic", "rm", "first"]);
        timed(&["network", "rm", "blue"]);
        timed(&["nic", "rm", "other"]);
        writes(&mut ends, 1);
        let took = removes.join().expect("it is done");
        assert!(took < LET_GO + SOON * patience(), "the end of a NIC took {took:?}");
        assert!(slow.iter().all(|thread| !thread.is_finished()), "nothing was held up");
        gone.iter_mut().for_each(|client| drop(client.wait()));
        drop(stopped);
        slow.into_iter().for_each(|thread| thread.join().expect("it is done"));
        assert!(begin.elapsed() < Duration::from_secs(60), "the process was given up");
    });
    // Nobody was harmed, and what waited was done.
    assert_eq!(processes(daemon)["red"], red);
    writes(&mut pair(&c, &d), 2);
    daemon.run(&["nic", "show", "red-2"]);
    assert!(daemon.cli(&["nic", "show", &e.name]).is_err());
}

/// What the file says of the one network comes late, and is said; others do not wait.
#[test]
fn the_configuration_is_read_again_beside_a_network_that_answers_nothing() {
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("config.toml");
    let write = |qps: u32| {
        let of = |name: &str, vni: u32| {
            format!(
                "[[networks]]\nname='{name}'\nvni={vni}\n\
                 [[nics]]\nname='of-{name}'\nnetwork='{name}'\nlimits={{max_qps={qps}}}\n"
            )
        };
        std::fs::write(&file, of("red", 300) + &of("blue", 301)).expect("a file");
    };
    write(5);
    let args = vec!["--config".to_owned(), file.display().to_string()];
    let options = DaemonOptions { processes: true, args, ..DaemonOptions::default() };
    let world = World::with(&options, Duration::from_secs(120));
    let daemon = &world.daemon;
    let stopped = Stopped::new(processes(daemon)["red"]);
    write(9);
    let begin = Instant::now();
    std::thread::scope(|scope| {
        let reads = scope.spawn(|| (daemon.cli(&["reload"]), begin.elapsed()));
        eventually("it has begun", || daemon.show_nic("of-blue")["limits"]["max_qps"] == 9);
        let asked = Instant::now();
        daemon.run(&["nic", "add", "other", "--network", "blue"]);
        assert!(asked.elapsed() < SOON * patience(), "{:?}", asked.elapsed());
        let (said, took) = reads.join().expect("it is done");
        assert!(took < Duration::from_secs(5) + SOON * patience(), "{took:?}: {said:?}");
        let said = said.expect_err("it is not in effect");
        assert!(said.contains("network \"red\" does not answer"), "{said}");
    });
    // The file holds as soon as it answers.
    drop(stopped);
    eventually("it is told late", || daemon.log().contains("NIC \"of-red\" changed"));
}

/// More than there are threads for calls, each given up by who asked.
#[test]
fn restarts_of_a_network_that_answers_nothing_keep_nobody_else_waiting() {
    let world = world();
    let _theirs = node(&world, "red");
    let stopped = Stopped::new(processes(&world.daemon)["red"]);
    let mut gone: Vec<_> =
        (0..20).map(|_| hangs_up(&world.daemon, &["network", "restart", "red"])).collect();
    std::thread::sleep(Duration::from_millis(500));
    let begin = Instant::now();
    world.daemon.run(&["nic", "add", "other", "--network", "net"]);
    let took = begin.elapsed();
    assert!(took < SOON * patience(), "{took:?}");
    gone.iter_mut().for_each(|client| drop(client.wait()));
    drop(stopped);
}

#[test]
fn an_upgrade_waits_for_all_of_them_at_once_and_not_for_long() {
    let options = DaemonOptions { processes: true, installed: true, ..DaemonOptions::default() };
    let world = World::with(&options, Duration::from_secs(120));
    let networks = ["red", "blue", "green"];
    networks.iter().zip(200..).for_each(|(name, vni)| world.daemon.add_network(name, vni));
    let (a, b) = (node(&world, "net"), node(&world, "net"));
    let theirs = networks.map(|name| node(&world, name));
    let mut ends = pair(&a, &b);
    let before = processes(&world.daemon);
    let stopped = networks.map(|name| Stopped::new(before[name]));
    let (longest, _) = under_traffic(&mut ends, |sent| {
        // Not all are ready again, which it says.
        let said = world.daemon.cli(&["upgrade"]);
        println!("{said:?}");
        let before = sent.load(Ordering::Relaxed);
        eventually("nothing goes on", || sent.load(Ordering::Relaxed) > before + 20);
    });
    println!("the longest write: {longest:?}");
    let status = world.daemon.run(&["status", "--json"]);
    let status: serde_json::Value = serde_json::from_str(&status).expect("JSON");
    let pause = Duration::from_micros(status["upgrade_pause_us"].as_u64().expect("a pause"));
    assert!(pause.abs_diff(longest) < Duration::from_secs(1) * patience(), "{pause:?} was told");
    assert!(longest < Duration::from_secs(8) * patience(), "{longest:?}");
    // They are none of ours any more.
    drop(stopped);
    let after = processes(&world.daemon);
    assert!(after.len() == 4 && after.iter().all(|(name, pid)| before[name] != *pid));
    for node in &theirs {
        told_that_it_is_lost(&node.guest);
        let anew = start_anew(node);
        writes(&mut pair(&anew, &anew), 1);
    }
}
