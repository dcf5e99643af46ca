//! The machine that QEMU is asked for.

use std::path::Path;

use super::{Files, Spec, cable, shared};
use crate::host;
use crate::vm::nested;

/// What is the same for a guest of this machine and one of a guest.
pub(in crate::vm) struct Parts<'a> {
    pub(in crate::vm) name: &'a str,
    pub(in crate::vm) number: u8,
    pub(in crate::vm) cpus: u8,
    /// Directory of kernel and initramfs, as QEMU sees it.
    pub(in crate::vm) image: &'a str,
    /// The root file system, which stays as it is.
    pub(in crate::vm) disk: &'a str,
    pub(in crate::vm) share: &'a str,
    pub(in crate::vm) console: &'a str,
    /// How QEMU emulates the processor.
    pub(in crate::vm) emulation: &'a [&'a str],
    /// For the kernel's command line, behind the lab's own words.
    pub(in crate::vm) words: &'a str,
}

/// All that the emulator knows but what it does slowly. A kernel that is told of fast string
/// instructions copies and clears by the byte, which is a pass of the emulator for each; page
/// tables of five levels cost each miss one more.
const EMULATION: [&str; 4] =
    ["-accel", "tcg,thread=multi", "-cpu", "max,-erms,-fsrm,-fsrs,-fzrm,-fsrc,-la57"];

/// The options of a machine but its agent, memory and network.
pub(in crate::vm) fn machine_args(parts: &Parts<'_>) -> Vec<String> {
    let Parts { name, number, cpus, image, disk, share, console, emulation, words } = parts;
    // The kernel's check of its timer takes a starved emulator for broken hardware and panics; that
    // of its clock goes over to one which is a device, and costs an exit each time it is read.
    let append = format!(
        "console=ttyS0 quiet panic=0 mitigations=off no_timer_check tsc=reliable \
         lab.name={name} lab.ip={number} {words}"
    );
    let words = [
        "-nodefaults",
        "-no-user-config",
        "-display",
        "none",
        "-kernel",
        &format!("{image}/vmlinuz"),
        "-initrd",
        &format!("{image}/initrd.gz"),
        // Not `if=virtio`: QEMU would choose the bus after it knows all devices, and one of further
        // root complexes takes no disks.
        "-drive",
        &format!("file={disk},if=none,id=root,format=raw,snapshot=on"),
        "-device",
        "virtio-blk-pci,drive=root",
        "-smp",
        &cpus.to_string(),
        "-append",
        &append,
        "-serial",
        &format!("file:{console}"),
        "-virtfs",
        &format!("local,path={share},mount_tag=host,security_model=none"),
        // A guest without entropy waits for it at the first getrandom(); iPXE would cost a second
        // of boot.
        "-device",
        "virtio-rng-pci",
        "-global",
        "virtio-net-pci.romfile=",
    ];
    emulation.iter().chain(&words).map(|word| (*word).to_owned()).collect()
}

pub(super) fn qemu_args(run: &Path, spec: &Spec, files: &Files) -> Vec<String> {
    let p = |path: &Path| path.display().to_string();
    let mut args = machine_args(&Parts {
        name: &spec.name,
        number: spec.number,
        cpus: spec.cpus,
        image: "/mnt",
        disk: "/mnt/root.img",
        share: &p(&files.share),
        console: &p(&files.console),
        emulation: if host::is_emulated() { &nested::EMULATION } else { &EMULATION },
        words: &if host::is_emulated() {
            format!("{} {}", spec.words, nested::WORDS)
        } else {
            spec.words.clone()
        },
    });
    let mut push = |words: &[&str]| args.extend(words.iter().map(|w| (*w).to_owned()));
    push(&["-serial", &format!("unix:{},server=on,wait=off", p(&files.agent))]);
    push(&["-qmp", &format!("unix:{},server=on,wait=off", p(&files.monitor))]);
    if spec.hosts {
        push(&["-drive", "file=/mnt/root.img,if=virtio,format=raw,snapshot=on"]);
        for (tag, path) in [("qemu", "/usr"), ("image", "/mnt")] {
            let what = format!("local,path={path},mount_tag={tag},security_model=none,readonly=on");
            push(&["-virtfs", &what]);
        }
    }
    for n in 0..spec.directories.len() {
        let path = shared(n);
        let what = format!("local,path={path},mount_tag=d{n},security_model=none,readonly=on");
        push(&["-virtfs", &what]);
    }
    if !spec.nic_args.is_empty() {
        args.extend(spec.nic_args.iter().cloned());
        return args;
    }
    let (mem, mac) = (spec.memory_mib, spec.mac());
    let (local, remote) =
        (p(&cable(run, &spec.name)), p(&cable(run, spec.peer.as_deref().unwrap_or("nobody"))));
    push(&["-M", "q35,memory-backend=mem", "-m", &format!("{mem}M")]);
    push(&["-object", &format!("memory-backend-memfd,id=mem,size={mem}M,share=on")]);
    // Datagram unix sockets: a TCP cable costs tens of milliseconds per small message.
    push(&[
        "-netdev",
        &format!(
            "dgram,id=n0,local.type=unix,local.path={local},remote.type=unix,remote.path={remote}"
        ),
    ]);
    push(&["-device", &format!("virtio-net-pci,netdev=n0,mac={mac}")]);
    if let Some(socket) = &spec.vhost_socket {
        push(&["-chardev", &format!("socket,id=c0,path={}", p(socket)), "-device"]);
        push(&["vhost-user-test-device-pci,chardev=c0,virtio-id=21,num_vqs=8,vq_size=128,\
                config_size=64,page-per-vq=on"]);
    }
    args
}
