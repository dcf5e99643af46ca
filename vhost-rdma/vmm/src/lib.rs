//! The exact options that give a VM a NIC and its companion netdev.
//!
//! The companion is an ordinary virtio-net device with the NIC's MAC address: the guest driver
//! finds it by that address and takes IP addresses, routes and neighbours from it. Guest memory
//! must be shared with the daemon in both VMMs, because the device reads and writes it directly.
//! The command line prints these options, the Kubernetes node agent hands them to pods.

mod passthrough;

use std::borrow::Cow;

pub use passthrough::{cloud_hypervisor_passthrough, qemu_passthrough};

/// Options that make no sense; the message says what to write instead.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct BadOption(String);

/// What the options need to know of a NIC.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Nic {
    /// Its name.
    pub name: String,
    /// Its MAC address, which the companion netdev shares.
    pub mac: String,
    /// Where the VMM connects.
    pub socket: String,
    /// The virtio device type, if the NIC has one of its own.
    pub virtio_id: Option<u32>,
    /// Completion vectors.
    pub comp_vectors: u32,
    /// Virtqueues.
    pub num_queues: u32,
}

/// Choices for QEMU.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct QemuArgs {
    /// Virtio device type; absent: that of the NIC, or the lab id 21.
    pub virtio_id: Option<u32>,
    /// The companion netdev; absent: a tap named after the NIC.
    pub netdev: Option<String>,
    /// Memory of the VM, shared with the daemon; absent: the line has it elsewhere.
    pub memory: Option<String>,
    /// Number of this NIC in its VM: makes the ids in the options unique.
    pub index: u32,
    /// The completion vectors that the NIC must have.
    pub vectors: Option<u32>,
}

/// Choices for cloud-hypervisor.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct CloudHypervisorArgs {
    /// Virtio device type; absent: that of the NIC, or 42.
    pub virtio_id: Option<u32>,
    /// The companion netdev's tap; absent: one named after the NIC.
    pub tap: Option<String>,
    /// Memory of the VM, shared with the daemon; absent: the line has it elsewhere.
    pub memory: Option<String>,
}

/// Entries in each virtqueue: events and commands are few, work requests do not pass through them.
const QUEUE_SIZE: u32 = 128;
/// Bytes of configuration space, as the device specification says.
const CONFIG_SIZE: u32 = 64;
/// A stock QEMU aborts on 42; 21 has a name there and no driver in Linux.
const LAB_VIRTIO_ID: u32 = 21;
/// Virtio device type of RDMA.
const VIRTIO_ID: u32 = 42;
/// IFNAMSIZ without the terminating zero (linux/if.h).
const IFNAME_MAX: usize = 15;

/// QEMU's options.
///
/// # Errors
/// A choice that makes no sense.
pub fn qemu(nic: &Nic, args: &QemuArgs) -> Result<Vec<String>, BadOption> {
    let index = args.index;
    check_vectors(nic, args.vectors)?;
    let mut out: Vec<String> = Vec::new();
    let mut push = |option: &str, value: String| out.extend([option.to_owned(), value]);
    if let Some(memory) = &args.memory {
        let memory = memory_size(memory)?;
        push("-machine", "q35,memory-backend=mem".to_owned());
        push("-m", memory.clone());
        push("-object", format!("memory-backend-memfd,id=mem,size={memory},share=on"));
    }
    push("-chardev", format!("socket,id=vrdma{index},path={}", qemu_escape(&nic.socket)));
    let id = check_id(args.virtio_id.or(nic.virtio_id).unwrap_or(LAB_VIRTIO_ID))?;
    push(
        "-device",
        format!(
            "vhost-user-test-device-pci,chardev=vrdma{index},virtio-id={id},num_vqs={},\
             vq_size={QUEUE_SIZE},config_size={CONFIG_SIZE},page-per-vq=on",
            nic.num_queues
        ),
    );
    let kind = args.netdev.clone().unwrap_or_else(|| format!("tap:{}", tap_name(&nic.name)));
    if let Some(netdev) = netdev(&kind, index)? {
        push("-netdev", netdev);
        push("-device", format!("virtio-net-pci,netdev=vrnet{index},mac={}", nic.mac));
    }
    Ok(out)
}

/// cloud-hypervisor's options.
///
/// # Errors
/// A choice that makes no sense.
pub fn cloud_hypervisor(nic: &Nic, args: &CloudHypervisorArgs) -> Result<Vec<String>, BadOption> {
    let mut out: Vec<String> = Vec::new();
    if let Some(memory) = &args.memory {
        out.extend(["--memory".to_owned(), format!("size={},shared=on", memory_size(memory)?)]);
    }
    let id = check_id(args.virtio_id.or(nic.virtio_id).unwrap_or(VIRTIO_ID))?;
    let sizes = (0..nic.num_queues).map(|_| QUEUE_SIZE.to_string()).collect::<Vec<_>>().join(",");
    let socket = ch_escape(&nic.socket);
    out.extend([
        "--generic-vhost-user".to_owned(),
        format!("socket={socket},device_type={id},queue_sizes=[{sizes}]"),
    ]);
    let tap = match &args.tap {
        Some(tap) => ifname(tap)?.to_owned(),
        None => tap_name(&nic.name),
    };
    out.extend(["--net".to_owned(), format!("tap={tap},mac={}", nic.mac)]);
    Ok(out)
}

fn check_vectors(nic: &Nic, vectors: Option<u32>) -> Result<(), BadOption> {
    match vectors {
        Some(vectors) if vectors != nic.comp_vectors => Err(BadOption(format!(
            "NIC {:?} has {} completion vectors, not {vectors}: the number is fixed when a NIC is \
             made; make it again with `vhost-rdma nic add --vectors {vectors}`",
            nic.name, nic.comp_vectors
        ))),
        _ => Ok(()),
    }
}

fn check_id(id: u32) -> Result<u32, BadOption> {
    if (1..=63).contains(&id) {
        return Ok(id);
    }
    Err(BadOption(format!(
        "virtio id {id} is not valid: it must be 1 to 63; 42 is RDMA, 21 the lab id that a stock \
         QEMU accepts"
    )))
}

fn memory_size(text: &str) -> Result<String, BadOption> {
    let digits = text.strip_suffix(['K', 'M', 'G', 'T']).unwrap_or(text);
    if digits.parse::<u64>().is_ok_and(|n| n > 0) && digits.bytes().all(|b| b.is_ascii_digit()) {
        // A bare number means bytes to cloud-hypervisor and MiB to QEMU's -m: it is never passed on
        // as it is.
        if digits.len() < text.len() {
            return Ok(text.to_owned());
        }
    }
    Err(BadOption(format!(
        "memory size {text:?} is not valid: write digits and K, M, G or T, such as 512M or 2G"
    )))
}

/// The companion's `-netdev`.
fn netdev(kind: &str, index: u32) -> Result<Option<String>, BadOption> {
    let bad = || {
        BadOption(format!(
            "netdev {kind:?} is not known: write tap:IFNAME, bridge:BRIDGE, dgram:LOCAL,REMOTE or \
             none, where LOCAL and REMOTE are HOST:PORT (IPv4) or a socket's path"
        ))
    };
    if kind == "none" {
        return Ok(None);
    }
    let (word, rest) = kind.split_once(':').ok_or_else(bad)?;
    let id = format!("id=vrnet{index}");
    Ok(Some(match word {
        "tap" => format!("tap,{id},ifname={},script=no,downscript=no", ifname(rest)?),
        "bridge" => format!("bridge,{id},br={}", ifname(rest)?),
        "dgram" => {
            let (local, remote) = rest.split_once(',').ok_or_else(bad)?;
            let local = dgram_end("local", local).ok_or_else(bad)?;
            let remote = dgram_end("remote", remote).ok_or_else(bad)?;
            format!("dgram,{id},{local},{remote}")
        }
        _ => return Err(bad()),
    }))
}

fn dgram_end(which: &str, text: &str) -> Option<String> {
    if text.starts_with('/') {
        return Some(format!("{which}.type=unix,{which}.path={}", qemu_escape(text)));
    }
    let (host, port) = text.rsplit_once(':')?;
    let port: u16 = port.parse().ok()?;
    // IPv4 only: QEMU 11.1 says "can't resolve host address '::1'" of a dgram netdev.
    let plain =
        !host.is_empty() && host.bytes().all(|b| b.is_ascii_alphanumeric() || b"-.".contains(&b));
    plain.then(|| format!("{which}.type=inet,{which}.host={host},{which}.port={port}"))
}

fn ifname(name: &str) -> Result<&str, BadOption> {
    let odd = |b: u8| b <= b' ' || b == b'/' || b == b',' || b == b'=' || b >= 0x7f;
    if name.is_empty() || name.len() > IFNAME_MAX || name.bytes().any(odd) {
        return Err(BadOption(format!(
            "interface name {name:?} is not valid: it must have 1 to {IFNAME_MAX} characters, \
             without spaces, '/', ',' and '='"
        )));
    }
    Ok(name)
}

/// A tap named after the NIC: the tail of a long name, since that is where such names differ.
#[must_use]
pub fn tap_name(nic: &str) -> String {
    const PREFIX: &str = "vr-";
    let tail = nic.len().saturating_sub(IFNAME_MAX - PREFIX.len());
    format!("{PREFIX}{}", &nic[tail..])
}

/// QEMU's option lists double a comma that belongs to a value.
fn qemu_escape(text: &str) -> String {
    text.replace(',', ",,")
}

/// cloud-hypervisor's option lists quote a value that has a separator, and double the quotes in it.
fn ch_escape(text: &str) -> String {
    if text.contains([',', '"', '[', ']', '=']) {
        format!("\"{}\"", text.replace('"', "\"\""))
    } else {
        text.to_owned()
    }
}

/// One line for a shell.
///
/// Words without special characters stay bare, commas and equals signs included, so that
/// `qemu-system-x86_64 $(… qemu-args NIC)` works: a shell does not look for quotes in what a
/// command printed.
///
/// # Errors
/// An option has a zero byte.
pub fn shell_line(options: &[String]) -> Result<String, BadOption> {
    let bare = |word: &str| {
        !word.is_empty()
            && word.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_=+:,./@%".contains(&b))
    };
    let mut line = String::new();
    for option in options {
        let word = if bare(option) {
            Cow::Borrowed(option.as_str())
        } else {
            shlex::try_quote(option).map_err(|_| {
                BadOption("an option has a zero byte, which no shell can pass on".to_owned())
            })?
        };
        if !line.is_empty() {
            line.push(' ');
        }
        line.push_str(&word);
    }
    Ok(line)
}

#[cfg(test)]
mod tests {
    use super::{
        CloudHypervisorArgs, Nic, QemuArgs, cloud_hypervisor, memory_size, netdev, qemu,
        shell_line, tap_name,
    };

    fn nic() -> Nic {
        Nic {
            mac: "02:00:00:00:00:01".to_owned(),
            socket: "/run/a,b/vhost.sock".to_owned(),
            comp_vectors: 4,
            num_queues: 8,
            name: "n1".to_owned(),
            virtio_id: None,
        }
    }

    fn qemu_args() -> QemuArgs {
        QemuArgs { memory: Some("512M".to_owned()), ..QemuArgs::default() }
    }

    #[test]
    fn qemu_gets_shared_memory_the_lab_id_and_a_netdev_with_the_same_mac() {
        let line = shell_line(&qemu(&nic(), &qemu_args()).unwrap()).unwrap();
        assert_eq!(
            line,
            "-machine q35,memory-backend=mem -m 512M \
             -object memory-backend-memfd,id=mem,size=512M,share=on \
             -chardev socket,id=vrdma0,path=/run/a,,b/vhost.sock \
             -device vhost-user-test-device-pci,chardev=vrdma0,virtio-id=21,num_vqs=8,\
             vq_size=128,config_size=64,page-per-vq=on \
             -netdev tap,id=vrnet0,ifname=vr-n1,script=no,downscript=no \
             -device virtio-net-pci,netdev=vrnet0,mac=02:00:00:00:00:01"
        );
    }

    #[test]
    fn a_second_nic_of_a_vm_repeats_no_id_and_no_memory() {
        let args = QemuArgs {
            index: 1,
            memory: None,
            virtio_id: Some(42),
            vectors: Some(4),
            ..qemu_args()
        };
        let line = qemu(&nic(), &args).unwrap().join(" ");
        assert!(
            !line.contains("memory") && !line.contains("vrdma0") && !line.contains("vrnet0"),
            "{line}"
        );
        assert!(line.contains("virtio-id=42"), "{line}");
    }

    #[test]
    fn the_number_of_queues_is_the_devices_and_no_one_elses() {
        assert!(qemu(&nic(), &QemuArgs { vectors: Some(8), ..qemu_args() }).is_err());
    }

    #[test]
    fn cloud_hypervisor_gets_the_registered_id() {
        let args =
            CloudHypervisorArgs { memory: Some("2G".to_owned()), ..CloudHypervisorArgs::default() };
        let options = cloud_hypervisor(&nic(), &args).unwrap();
        assert_eq!(
            options,
            [
                "--memory",
                "size=2G,shared=on",
                "--generic-vhost-user",
                "socket=\"/run/a,b/vhost.sock\",device_type=42,queue_sizes=[128,128,128,128,128,\
                 128,128,128]",
                "--net",
                "tap=vr-n1,mac=02:00:00:00:00:01",
            ]
        );
    }

    #[test]
    fn what_a_shell_would_expand_is_quoted() {
        let words =
            ["a=b,c".to_owned(), "q=[1,2]".to_owned(), "it's $HOME".to_owned(), String::new()];
        let line = shell_line(&words).unwrap();
        assert!(line.starts_with("a=b,c '"), "{line}");
        assert_eq!(shlex::split(&line).unwrap(), words);
    }

    #[test]
    fn netdevs() {
        let line = |kind: &str| netdev(kind, 0).unwrap().unwrap_or_default();
        assert_eq!(line("none"), "");
        assert_eq!(line("bridge:br0"), "bridge,id=vrnet0,br=br0");
        assert_eq!(
            line("dgram:127.0.0.1:5001,localhost:5002"),
            "dgram,id=vrnet0,local.type=inet,local.host=127.0.0.1,local.port=5001,\
             remote.type=inet,remote.host=localhost,remote.port=5002"
        );
        assert_eq!(
            line("dgram:/a,/b"),
            "dgram,id=vrnet0,local.type=unix,local.path=/a,remote.type=unix,remote.path=/b"
        );
        for kind in [
            "",
            "tap",
            "tap:",
            "tap:a,b=c",
            "tap:0123456789abcdef",
            "user:x",
            "dgram:a",
            "dgram:a:1",
            "dgram:a:1,b:x",
            "dgram:x,y:1",
            "dgram:[::1]:1,[::1]:2",
        ] {
            assert!(netdev(kind, 0).is_err(), "{kind}");
        }
    }

    #[test]
    fn sizes_and_names() {
        assert!(memory_size("1G").is_ok());
        for text in ["", "G", "0G", "1024", "1g,share=off", "+1G"] {
            assert!(memory_size(text).is_err(), "{text}");
        }
        assert_eq!(tap_name("a"), "vr-a");
        assert_eq!(tap_name("a-very-long-name-01").len(), 15);
    }
}
