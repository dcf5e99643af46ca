//! The README's five commands, as far as they are ours: each is run as it stands there.

use std::fs;
use std::path::Path;
use std::process::Command;

use crate::daemon::Daemon;

/// The first block of commands behind a heading. A command that a backslash goes on with is one.
fn block(text: &str, heading: &str) -> Vec<String> {
    let (_, section) = text.split_once(heading).unwrap();
    let (_, code) = section.split_once("```sh\n").unwrap();
    let code = code.split_once("```").unwrap().0.replace("\\\n", "");
    code.lines().map(str::to_owned).collect()
}

#[test]
fn two_vms_in_five_commands() {
    let readme = Path::new(env!("CARGO_MANIFEST_DIR")).join("../README.md");
    let commands = block(&fs::read_to_string(readme).unwrap(), "\n## Two VMs, in five commands\n");
    let [build, serve, add, vms @ ..] = commands.as_slice() else { panic!("{commands:?}") };
    assert!(build.starts_with("cargo build --release"), "{build}");
    assert_eq!(serve, "vhost-rdma serve &");
    assert_eq!(vms.len(), 2, "{vms:?}");

    let daemon = Daemon::start();
    let program = Path::new(env!("CARGO_BIN_EXE_vhost-rdma")).parent().unwrap();
    let path = format!("{}:{}", program.display(), std::env::var("PATH").unwrap());
    let sh = |line: &str| {
        let mut shell = Command::new("sh");
        shell.args(["-ec", line]).env("PATH", &path).env("VHOST_RDMA_SOCKET", daemon.socket());
        let out = shell.output().unwrap();
        assert!(out.status.success(), "{line}: {}", String::from_utf8_lossy(&out.stderr));
        String::from_utf8(out.stdout).unwrap()
    };
    sh(add);
    for (n, vm) in vms.iter().enumerate() {
        // What the shell would start: its words, one on a line.
        let words = sh(&vm.replacen("eval qemu-system-x86_64", "eval printf '%s\\\\n'", 1));
        let words: Vec<&str> = words.lines().collect();
        let number = n + 1;
        let socket = daemon.run_dir().join(format!("nics/vm{number}/vhost.sock"));
        assert!(words.iter().any(|w| w.contains(socket.to_str().unwrap())), "{words:?}");
        let cable = format!("/run/vm{number}.net");
        let netdev = words.iter().find(|w| w.contains(&cable)).unwrap();
        assert!(netdev.contains("dgram") && netdev.contains("/run/vm"), "{netdev}");
        assert!(words.iter().any(|w| w.contains("share=on")), "{words:?}");
    }
}
