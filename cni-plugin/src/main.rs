//! The program that a container runtime executes.

use std::io::{IsTerminal as _, Write as _};
use std::process::ExitCode;

use vhost_rdma_cni::{Host, VhostRdma};

const HELP: &str = "\
CNI plugin that gives pods their virtual RDMA NICs.

A container runtime executes it: the command comes in CNI_COMMAND (ADD, DEL, CHECK, GC, STATUS,
VERSION), the network configuration on stdin, the answer goes to stdout. CNI 0.3.0 to 1.1.0.
It asks the node agent (vhost-rdma-agent) which NICs the pod was granted.

Fields of its own in the network configuration:

  type      the name under which this program is installed: \"vhost-rdma-cni\"
  deviceID  the one NIC to attach (Multus fills it in); without it, all NICs of the pod

Where things are on the host is said by the environment of the runtime, never by a configuration:

  VHOST_RDMA_AGENT_SOCKET     where the node agent listens
                              [/run/vhost-rdma-agent/agent.sock]
  VHOST_RDMA_DEVICE_INFO_DIR  where device information files may be written
                              [/var/run/k8s.cni.cncf.io/devinfo/cni]
  VHOST_RDMA_KUBELET_PLUGINS  where the kubelet has its checkpoint
                              [/var/lib/kubelet/device-plugins]
  VHOST_RDMA_SYSFS            where the kernel shows devices [/sys]

Options:
  -h, --help     this text
  -V, --version  the program's version; CNI_COMMAND=VERSION answers with those of CNI

Manual: vhost-rdma-cni(8)
";

fn main() -> ExitCode {
    let text = match std::env::args_os().nth(1) {
        Some(option) if option == "--help" || option == "-h" => HELP.to_owned(),
        Some(option) if option == "--version" || option == "-V" => {
            format!("vhost-rdma-cni {}\n", env!("CARGO_PKG_VERSION"))
        }
        Some(other) => {
            let other = other.to_string_lossy();
            eprintln!("vhost-rdma-cni: unknown argument {other:?}; --help says how it is used");
            return ExitCode::from(2);
        }
        None if std::env::var_os("CNI_COMMAND").is_none() && std::io::stdin().is_terminal() => {
            eprint!("{HELP}");
            return ExitCode::from(2);
        }
        None => return cni_skel::run(&VhostRdma { host: Host::of_process() }),
    };
    match std::io::stdout().write_all(text.as_bytes()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}
