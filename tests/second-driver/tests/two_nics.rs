//! Two second drivers and a real daemon, each a process of its own.
//!
//! `VHOST_RDMA_BIN` names the daemon; without it, the one that was built beside this test. Nothing
//! waits for ever: the drivers have a timeout, and the daemon must be ready within one.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "helpers of tests")]

use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

const DRIVER: &str = env!("CARGO_BIN_EXE_second-driver");

fn program() -> PathBuf {
    let beside = Path::new(DRIVER).with_file_name("vhost-rdma");
    let program = std::env::var_os("VHOST_RDMA_BIN").map_or(beside, PathBuf::from);
    assert!(program.exists(), "{} is not built: cargo build --workspace --bins", program.display());
    program
}

/// A daemon in a folder of its own, which ends with the test.
struct Daemon(tempfile::TempDir, Child);

impl Daemon {
    /// A daemon with these NICs, each with its network.
    fn with(nics: &[(&str, &str)]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut command = Command::new(program());
        command.args(["serve", "--ephemeral", "--runtime-dir"]).arg(folder.path());
        let mut process = command.stderr(Stdio::piped()).spawn().unwrap();
        let log = BufReader::new(process.stderr.take().unwrap());
        let daemon = Self(folder, process);
        let (tell, ready) = mpsc::channel();
        std::thread::spawn(move || {
            let lines = log.lines().map_while(Result::ok);
            lines.filter(|line| line.contains("ready")).for_each(|_| tell.send(()).unwrap_or(()));
        });
        ready.recv_timeout(Duration::from_secs(60)).expect("the daemon is not ready");
        ["blue", "green"].iter().for_each(|network| daemon.admin(&["network", "add", network]));
        nics.iter().for_each(|(nic, net)| daemon.admin(&["nic", "add", nic, "--network", net]));
        daemon
    }

    fn admin(&self, arguments: &[&str]) {
        let socket = self.0.path().join("admin.sock");
        let mut command = Command::new(program());
        let output = command.arg("--socket").arg(socket).args(arguments).output().unwrap();
        assert!(output.status.success(), "{arguments:?}: {output:?}");
    }

    fn driver(&self, nic: &str, side: [&str; 2], options: &str) -> (Child, BufReader<ChildStdout>) {
        let mut command = Command::new(DRIVER);
        command.arg("--socket").arg(self.0.path().join(format!("nics/{nic}/vhost.sock")));
        command.args(side).args(["--verify", "--gid-index", "1"]).args(options.split(' '));
        let mut process = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let output = BufReader::new(process.stdout.take().unwrap());
        (process, output)
    }

    /// A server on one NIC and a client on another: whether each succeeded, and what it said.
    fn pingpong(&self, server: &str, client: &str, options: &str) -> [(bool, String); 2] {
        let mut server = self.driver(server, ["--listen", "0"], options);
        let mut line = String::new();
        server.1.read_line(&mut line).unwrap();
        let port = line.trim().rsplit(' ').next().unwrap();
        let client = self.driver(client, ["--connect", &format!("127.0.0.1:{port}")], options);
        [server, client].map(|(mut process, mut output)| {
            let mut said = String::new();
            output.read_to_string(&mut said).unwrap();
            process.stderr.take().unwrap().read_to_string(&mut said).unwrap();
            (process.wait().unwrap().success(), said)
        })
    }

    /// All messages of a pingpong were exchanged, and right, at both ends.
    fn succeeds(&self, server: &str, client: &str, iters: u32, size: u32) {
        let options = format!("--iters {iters} --size {size}");
        for (success, said) in self.pingpong(server, client, &options) {
            let counts = format!("{iters} of {iters} messages sent, {iters} received");
            assert!(success && said.contains(&counts) && said.contains("data right"), "{said}");
        }
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.1.kill();
        let _ = self.1.wait();
    }
}

#[test]
fn two_nics_of_a_network_exchange_verified_messages() {
    let daemon = Daemon::with(&[("a", "blue"), ("b", "blue")]);
    // Inline; within a page; over pages; a region that needs two levels of list pages.
    [(100, 16), (100, 1500), (100, 20_001), (5, 1_100_000)]
        .iter()
        .for_each(|(iters, size)| daemon.succeeds("a", "b", *iters, *size));
    daemon.succeeds("b", "a", 100, 4096);
}

#[test]
fn a_nic_of_another_network_gets_no_data() {
    let daemon = Daemon::with(&[("a", "blue"), ("b", "blue"), ("stranger", "green")]);
    let [server, client] = daemon.pingpong("stranger", "b", "--iters 100 --timeout 6");
    assert!(!client.0 && client.1.contains("RETRY_EXC_ERR"), "{}", client.1);
    assert!(!server.0 && server.1.contains("0 of 100 messages sent, 0 received"), "{}", server.1);
    assert!(server.1.contains("no completion event within"), "{}", server.1);
    // The same client, to a NIC of its own network.
    daemon.succeeds("a", "b", 100, 4096);
}
