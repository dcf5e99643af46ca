//! The grammar of the command line.

use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};
use clap_complete::Shell;

use super::vf::VfArgs;
use crate::admin::MetricsAddress;
use crate::config::parse_mode;
use crate::telemetry::LogFormat;

/// Virtual RDMA NICs for VMs.
///
/// `vhost-rdma serve` runs the daemon; the other commands speak to it. Exit status: 0 success, 1
/// fault of the host, 2 wrong argument, 3 daemon not reachable, 4 no such thing, 5 conflict (name
/// taken, network not empty, socket in use), 6 no permission.
#[derive(Debug, Parser)]
#[command(name = "vhost-rdma", version, propagate_version = true)]
pub struct Cli {
    /// The daemon's admin socket [default: admin.sock in $XDG_RUNTIME_DIR/vhost-rdma or
    /// /run/vhost-rdma]
    #[arg(
        long,
        global = true,
        env = "VHOST_RDMA_SOCKET",
        value_name = "PATH",
        hide_env_values = true
    )]
    pub socket: Option<PathBuf>,
    /// Write JSON with stable field names
    #[arg(long, global = true)]
    pub json: bool,
    /// What to do
    #[command(subcommand)]
    pub command: Command,
}

/// Commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run the daemon
    Serve(Box<ServeArgs>),
    /// Serve one network; started by the daemon
    #[command(hide = true)]
    NetworkProcess {
        /// The network's name, for those who look at the list of processes
        network: String,
    },
    /// Serve what NICs on RNICs share; started by the daemon
    #[command(hide = true)]
    OutsideProcess,
    /// Run the daemon as a child, keep its sessions when it dies, and start it again
    ///
    /// For where no service manager does that, such as a container: `vhost-rdma keep -- serve …`.
    /// It speaks the protocol of systemd's descriptor store. SIGTERM and SIGINT end the daemon, and
    /// SIGHUP reaches it too.
    Keep {
        /// Form of this parent's own log; the daemon's is an option of the daemon
        #[arg(long, value_enum, default_value_t)]
        log_format: LogFormat,
        /// The daemon's command and options
        #[arg(required = true, last = true, value_name = "serve …")]
        command: Vec<OsString>,
    },
    /// The child before it is the daemon
    #[command(hide = true)]
    Kept {
        /// As `keep` was told
        #[arg(required = true, last = true)]
        command: Vec<OsString>,
    },
    /// Run a program with an RDMA device: no root, no configuration, no VM
    ///
    /// Uses the daemon that runs, or starts one for as long as the program lives. Programs of one
    /// `run` find NICs of each other's as devices `vhost_rdma0`, `vhost_rdma1`, … A program that
    /// cannot load the libraries (static, of musl, setuid, with file capabilities) is refused; what
    /// a script or `sh -c` starts is not looked at, and finds no device if it is such a program.
    Run {
        /// NICs, each a device of the program
        #[arg(
            long,
            default_value_t = 1,
            value_name = "N",
            value_parser = clap::value_parser!(u32).range(1..=64)
        )]
        nics: u32,
        /// Their network [default: default]
        #[arg(long)]
        network: Option<String>,
        /// Use the NIC at this socket, and start nothing; may be given several times
        #[arg(long, value_name = "SOCKET", conflicts_with_all = ["nics", "network"])]
        connect: Vec<PathBuf>,
        /// The program and its arguments
        #[arg(required = true, last = true, value_name = "PROGRAM")]
        command: Vec<OsString>,
    },
    /// Hold NICs for `run`, which says on a pipe which ones; started by it
    #[command(hide = true)]
    RunNics,
    /// Networks: only NICs of one network can find or reach each other
    #[command(subcommand)]
    Network(NetworkCommand),
    /// Virtual RDMA NICs
    #[command(subcommand)]
    Nic(NicCommand),
    /// Virtual functions (SR-IOV) of the host's NICs; needs no daemon
    ///
    /// A physical function is named by its PCI address, its network interface or its RDMA device; a
    /// virtual one likewise, or as PF/NUMBER, such as ens3f0/2. Changes are journaled: what a crash
    /// interrupts is completed or undone.
    Vf(VfArgs),
    /// Addresses outside of this host that NICs on an RNIC may reach
    #[command(subcommand)]
    Peer(PeerCommand),
    /// Have the daemon read its configuration file and certificates again, as SIGHUP does
    Reload,
    /// Have the daemon become the program that was installed in its place
    ///
    /// VMs keep their connections and their queue pairs: traffic pauses for some milliseconds, and
    /// nothing fails. The program is the file that the daemon was started from, as it is now.
    Upgrade {
        /// Also if guests lose their device by it: on RNICs, of processes, with --one-process
        #[arg(long)]
        force: bool,
    },
    /// Show the daemon's state
    Status,
    /// Show the versions of this program and of the daemon
    Version,
    /// Write the manual page: to standard output, or one page for each command to a directory
    Man {
        /// Write all pages into this directory
        #[arg(long, value_name = "DIR")]
        dir: Option<PathBuf>,
    },
    /// Write a shell completion script to standard output
    Completions {
        /// The shell
        shell: Shell,
    },
}

/// How the daemon runs.
#[derive(Debug, Args)]
pub struct ServeArgs {
    /// Where sockets and state are [default: /run/vhost-rdma for root, else
    /// $XDG_RUNTIME_DIR/vhost-rdma]
    #[arg(long, value_name = "DIR")]
    pub runtime_dir: Option<PathBuf>,
    /// Configuration file (TOML); options given here win over it
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Worker threads with --one-process, each of which owns whole NICs [default: a quarter of the
    /// CPUs]
    #[arg(long, value_name = "N")]
    pub workers: Option<u32>,
    /// Worker threads of each network's own process; its NICs are spread over them, and move to
    /// where there is time [default: 1]
    #[arg(long, value_name = "N")]
    pub network_workers: Option<u32>,
    /// Bytes of memory that each network's own process may have (K, M, G and T are powers of 1024);
    /// the kernel ends one that takes more [default: no limit]
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes, conflicts_with = "one_process")]
    pub network_memory_max: Option<u64>,
    /// Threads that each network's own process may have [default: no limit]
    #[arg(long, value_name = "N", conflicts_with = "one_process")]
    pub network_pids_max: Option<u64>,
    /// Serve all networks in this process, not each in a sandboxed one of its own (for debugging)
    #[arg(long)]
    pub one_process: bool,
    /// Microseconds that a worker polls before it sleeps; 0 never polls [default: 10]
    #[arg(long, value_name = "MICROSECONDS")]
    pub poll_us: Option<u32>,
    /// Forget networks and NICs when the daemon ends
    #[arg(long)]
    pub ephemeral: bool,
    /// Owner of the admin socket (name or number): may do everything
    #[arg(long, value_name = "USER")]
    pub admin_owner: Option<String>,
    /// Group of the admin socket (name or number)
    #[arg(long, value_name = "GROUP")]
    pub admin_group: Option<String>,
    /// Octal mode of the admin socket [default: 0600]
    #[arg(long, value_name = "MODE", value_parser = parse_mode)]
    pub admin_mode: Option<u32>,
    /// Serve Prometheus metrics at IP:PORT or unix:PATH, path /metrics
    #[arg(long, value_name = "ADDRESS")]
    pub metrics: Option<MetricsAddress>,
    /// Take rdma_cm of guests on RNICs from other daemons here; needs a certificate, its key and an
    /// authority
    #[arg(long, value_name = "IP:PORT", requires_all = ["cm_cert", "cm_key", "cm_ca"])]
    pub cm_listen: Option<SocketAddr>,
    /// This daemon's certificate (PEM), for the host name or address that others' peer entries have
    #[arg(long, value_name = "FILE", requires = "cm_listen")]
    pub cm_cert: Option<PathBuf>,
    /// Its private key (PEM)
    #[arg(long, value_name = "FILE", requires = "cm_listen")]
    pub cm_key: Option<PathBuf>,
    /// The authority that all daemons have their certificates of (PEM); both in one file while a
    /// new one takes the place of the old
    #[arg(long, value_name = "FILE", requires = "cm_listen")]
    pub cm_ca: Option<PathBuf>,
    /// Connections with other daemons, in each direction, at most; idle ones are closed anyway
    /// [default: 1024]
    #[arg(long, value_name = "N", requires = "cm_listen")]
    pub cm_daemons: Option<u32>,
    /// Start although the certificate is not there yet; `reload` takes it up
    #[arg(long, requires = "cm_listen")]
    pub cm_wait: bool,
    /// A port at which third-party hosts reach guests on RNICs by rdma_cm, on all addresses of this
    /// host; may be given again
    #[arg(
        long = "cm-port",
        value_name = "PORT",
        value_parser = clap::value_parser!(u16).range(1..)
    )]
    pub cm_ports: Vec<u16>,
    /// Say whether a daemon would start with these options, this file and the state that is saved,
    /// and serve nothing
    #[arg(long)]
    pub check: bool,
    /// End when the process that started this one ends
    #[arg(long, hide = true)]
    pub with_parent: bool,
    /// Form of the log on standard error; $VHOST_RDMA_LOG filters it
    #[arg(long, value_enum, default_value_t)]
    pub log_format: LogFormat,
}

/// `network …`
#[derive(Debug, Subcommand)]
pub enum NetworkCommand {
    /// Make a network
    Add {
        /// 1 to 63 characters of a-z, 0-9, '.', '_' and '-'
        name: String,
        /// Virtual network identifier, 1 to 16777215 [default: the next free one]
        #[arg(long)]
        vni: Option<u32>,
    },
    /// Remove an empty network
    Rm {
        /// Which one
        name: String,
    },
    /// Have another process go on with a network's NICs; their guests notice a short pause
    ///
    /// For a daemon whose processes are to forget what they have become: memory that is in pieces,
    /// a log filter, a core that they are bound to. NICs for processes lose their processes.
    Restart {
        /// Which one
        name: String,
    },
    /// Show all networks
    List,
}

/// `peer …`
#[derive(Debug, Subcommand)]
pub enum PeerCommand {
    /// Let NICs of a network reach an address; an entry of the same address is replaced
    Add {
        /// As guests name it: an address, or a prefix such as 10.0.0.0/24
        address: String,
        /// The network
        #[arg(long, default_value = "default")]
        network: String,
        /// The address of the host that has it, where that is another [default: the same]
        #[arg(long, value_name = "IP")]
        through: Option<String>,
        /// The daemon that serves it, where one of ours does: rdma_cm goes by it (see
        /// `serve --cm-listen`)
        #[arg(long, value_name = "HOST:PORT")]
        daemon: Option<String>,
    },
    /// Forbid it again: connections to it end
    #[command(visible_alias = "remove")]
    Rm {
        /// As it was added
        address: String,
        /// The network
        #[arg(long, default_value = "default")]
        network: String,
    },
    /// Replace the set of peers that the cluster's controller gives a network: all of it or nothing
    ///
    /// What was added with `peer add`, or stands in the configuration file, stays.
    Replace {
        /// The network
        #[arg(long, default_value = "default")]
        network: String,
        /// The set as `peer list --json` prints it: a list of {"address", "through", "daemon"}; `-`
        /// is standard input
        #[arg(long, value_name = "FILE")]
        file: PathBuf,
        /// Which set it is: one with a smaller generation of the same epoch is refused
        #[arg(long, value_name = "N")]
        generation: Option<u64>,
        /// Of which count; generations of different ones are not compared
        #[arg(long, value_name = "N", default_value_t = 0, requires = "generation")]
        epoch: u64,
    },
    /// Show all peers
    List {
        /// Only those of this network
        #[arg(long)]
        network: Option<String>,
    },
}

/// `nic …`
#[derive(Debug, Subcommand)]
pub enum NicCommand {
    /// Make a NIC and listen for its VMM
    Add(Box<NicAdd>),
    /// Remove a NIC: its VM loses the device at once
    Rm {
        /// Which one
        name: String,
    },
    /// Change a live NIC
    Set(Box<NicSet>),
    /// Show all NICs
    List {
        /// Only those of this network
        #[arg(long)]
        network: Option<String>,
    },
    /// Show a NIC with its counters and objects
    Show {
        /// Which one
        name: String,
    },
    /// Print the QEMU options that give a VM this NIC
    ///
    /// QEMU 10.2 or newer. A stock QEMU has no name for virtio id 42 (RDMA) in its table and aborts
    /// when a device with it is made; so the options use the lab id 21, which the guest driver
    /// binds only if the device's configuration space says that it is ours. With a QEMU that knows
    /// 42, use --virtio-id 42.
    QemuArgs(QemuArgs),
    /// Print the cloud-hypervisor options that give a VM this NIC
    ///
    /// cloud-hypervisor 52 or newer, which takes virtio id 42 (RDMA) as it is.
    CloudHypervisorArgs(CloudHypervisorArgs),
}

/// The most that a guest may hold.
#[derive(Debug, Args, Clone, Copy)]
#[command(next_help_heading = "Limits")]
pub struct LimitArgs {
    /// Most queue pairs
    #[arg(long, value_name = "N")]
    pub max_qps: Option<u32>,
    /// Most completion queues
    #[arg(long, value_name = "N")]
    pub max_cqs: Option<u32>,
    /// Most shared receive queues
    #[arg(long, value_name = "N")]
    pub max_srqs: Option<u32>,
    /// Most memory regions
    #[arg(long, value_name = "N")]
    pub max_mrs: Option<u32>,
    /// Most registered bytes; K, M, G and T are powers of 1024
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes)]
    pub max_mr_bytes: Option<u64>,
    /// Most bytes of its own memory that the daemon keeps for the guest; K, M, G and T are powers
    /// of 1024
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes)]
    pub max_kept_bytes: Option<u64>,
    /// Most bytes of memory that the VMM may share with the daemon; K, M, G and T are powers of
    /// 1024
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes)]
    pub max_guest_bytes: Option<u64>,
    /// Most protection domains
    #[arg(long, value_name = "N")]
    pub max_pds: Option<u32>,
    /// Most address handles
    #[arg(long, value_name = "N")]
    pub max_ahs: Option<u32>,
    /// Most contexts (processes that use the device, and one for the kernel)
    #[arg(long, value_name = "N")]
    pub max_contexts: Option<u32>,
}

/// Who may open a NIC's socket.
#[derive(Debug, Args, Clone)]
#[command(next_help_heading = "Socket")]
pub struct AccessArgs {
    /// Owner of the NIC's socket: the user that the VMM runs as (name or number)
    #[arg(long, value_name = "USER")]
    pub owner: Option<String>,
    /// Group of the NIC's socket (name or number)
    #[arg(long, value_name = "GROUP")]
    pub group: Option<String>,
    /// Octal mode of the NIC's socket [default of a new NIC: 0660]
    #[arg(long, value_name = "MODE", value_parser = parse_mode)]
    pub mode: Option<u32>,
    /// Whom else the NIC's socket lets in: u:USER:rw or g:GROUP:rw; may be given several times
    #[arg(long, value_name = "ENTRY", value_delimiter = ',')]
    pub acl: Vec<String>,
}

/// `nic add`
#[derive(Debug, Args)]
pub struct NicAdd {
    /// 1 to 63 characters of a-z, 0-9, '.', '_' and '-'
    pub name: String,
    /// Its network
    #[arg(long, default_value = "default")]
    pub network: String,
    /// MAC address, the same as of the companion netdev in the guest [default: a random locally
    /// administered one]
    #[arg(long)]
    pub mac: Option<String>,
    /// An address that the NIC may use; may be given several times [default: any that no other NIC
    /// of the network holds]
    #[arg(long = "address", value_name = "IP", value_delimiter = ',')]
    pub addresses: Vec<String>,
    /// Virtio device type told to the VMM [default: 42, for QEMU the lab id 21]
    #[arg(long, value_name = "ID")]
    pub virtio_id: Option<u32>,
    /// Completion vectors [default: 4]
    #[arg(long, value_name = "N")]
    pub vectors: Option<u32>,
    /// What carries the verbs: soft, or rnic:DEVICE for an RNIC of this host, or
    /// rnic:DEVICE@ADDRESS with an address of the host that stands for the guest's
    #[arg(long, default_value = "soft", value_name = "BACKING")]
    pub backing: String,
    /// Whose device it is: a VM's (vm), or that of any number of processes of this host (process)
    #[arg(long = "for", default_value = "vm", value_name = "GUESTS")]
    pub guests: String,
    #[command(flatten)]
    pub limits: LimitArgs,
    #[command(flatten)]
    pub access: AccessArgs,
}

/// `nic set`
#[derive(Debug, Args)]
pub struct NicSet {
    /// Which one
    pub name: String,
    /// The addresses that the NIC may use from now on, instead of the present ones; may be given
    /// several times
    #[arg(
        long = "address",
        value_name = "IP",
        value_delimiter = ',',
        conflicts_with = "any_address"
    )]
    pub addresses: Vec<String>,
    /// Let the NIC use any address that no other NIC of the network holds
    #[arg(long)]
    pub any_address: bool,
    #[command(flatten)]
    pub limits: LimitArgs,
    #[command(flatten)]
    pub access: AccessArgs,
    /// Take the socket's access control list away
    #[arg(long, conflicts_with = "acl", help_heading = "Socket")]
    pub no_acl: bool,
}

/// `nic qemu-args`
#[derive(Debug, Args)]
pub struct QemuArgs {
    /// Which one
    pub name: String,
    /// Virtio device type [default: that of the NIC, or the lab id 21]
    #[arg(long, value_name = "ID")]
    pub virtio_id: Option<u32>,
    /// The companion netdev: tap:IFNAME, bridge:BRIDGE, dgram:LOCAL,REMOTE (each HOST:PORT or a
    /// socket's path) or none [default: a tap named after the NIC]
    #[arg(long, value_name = "KIND")]
    pub netdev: Option<String>,
    /// Memory of the VM, shared with the daemon
    #[arg(long, value_name = "SIZE", default_value = "1G")]
    pub memory: String,
    /// Leave the memory and machine options away: for a second NIC of one VM, or a command line
    /// that has them
    #[arg(long)]
    pub no_memory: bool,
    /// Number of this NIC in its VM: makes the ids in the options unique
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub index: u32,
    /// Check that the NIC has this number of completion vectors; it is chosen with
    /// `nic add --vectors`
    #[arg(long, value_name = "N")]
    pub vectors: Option<u32>,
}

/// `nic cloud-hypervisor-args`
#[derive(Debug, Args)]
pub struct CloudHypervisorArgs {
    /// Which one
    pub name: String,
    /// Virtio device type [default: that of the NIC, or 42]
    #[arg(long, value_name = "ID")]
    pub virtio_id: Option<u32>,
    /// The companion netdev's tap [default: named after the NIC]
    #[arg(long, value_name = "IFNAME")]
    pub tap: Option<String>,
    /// Memory of the VM, shared with the daemon
    #[arg(long, value_name = "SIZE", default_value = "1G")]
    pub memory: String,
    /// Leave the memory option away
    #[arg(long)]
    pub no_memory: bool,
}

fn parse_bytes(text: &str) -> Result<u64, String> {
    let bad = || {
        format!(
            "{text:?} is not a number of bytes: write digits, and K, M, G or T for powers of 1024"
        )
    };
    let (digits, shift) = match text.char_indices().last() {
        Some((at, 'K' | 'k')) => (&text[..at], 10),
        Some((at, 'M' | 'm')) => (&text[..at], 20),
        Some((at, 'G' | 'g')) => (&text[..at], 30),
        Some((at, 'T' | 't')) => (&text[..at], 40),
        _ => (text, 0),
    };
    let number: u64 = digits.parse().map_err(|_| bad())?;
    number.checked_mul(1 << shift).ok_or_else(bad)
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::{Cli, parse_bytes};

    #[test]
    fn the_grammar_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn bytes() {
        assert_eq!(parse_bytes("4096"), Ok(4096));
        assert_eq!(parse_bytes("2G"), Ok(2 << 30));
        for text in ["", "G", "1.5G", "-1", "1GiB", "99999999999T", "1é"] {
            assert!(parse_bytes(text).is_err(), "{text}");
        }
    }
}
