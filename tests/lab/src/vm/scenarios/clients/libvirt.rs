//! libvirt: guest a is a domain, made from the text that docs/OPERATIONS.md gives to users.
//!
//! The text is read from the document. What the lab changes in it is what any user would change:
//! the emulator's kind, the disk, the companion's network, the socket's directory; and what the
//! lab's guests need besides (their kernel, consoles, share). The words for the device must be
//! those that the daemon prints.
//!
//! libvirtd is Debian's, in a root of its own without its drivers for networks and firewalls, and
//! in a process namespace: nothing that it starts outlives the process that we hold. The companion
//! is a cable of UDP datagrams on loopback, since libvirt knows no unix sockets for that.

use std::fs;
use std::net::UdpSocket;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::super::client::{Client, LISTENS, drive};
use super::super::fixture::{Fixture, Options, nic};
use crate::cache::Cache;
use crate::exec::{run_logged, tied, workspace};
use crate::host::Archive;
use crate::roots::{self, Debian, Recipe, owned};
use crate::rows::Row;
use crate::vm::daemon::{self, Daemon};
use crate::vm::guest::{Domain, Guest, Spec, mac};
use crate::vm::{Lab, MEMORY_MIB};

const DOCUMENT: &str = "docs/OPERATIONS.md";
/// What the document has besides the daemon's words.
const ADDRESS: &str = ",bus=pcie.0,addr=0x10";
const WAIT: Duration = Duration::from_secs(60);

pub(super) const CLIENT: Client = Client {
    name: "libvirt: a domain's NIC",
    server: "rstream -b 10.9.0.2 -S 65536 -I 100 -C 1 -T v",
    ready: LISTENS,
    client: "rstream -s 10.9.0.2 -S 65536 -I 100 -C 1 -T v",
    bytes: 100 * 65536,
};

const PACKAGES: &[&str] = &[
    "libvirt-clients",
    "libvirt-daemon",
    "libvirt-daemon-driver-qemu",
    "qemu-system-x86",
    "qemu-utils",
];

/// In namespaces of its own: `$1` root, `$2` run directory, `$3` image directory. It ends with the
/// domain, whose loss is seen by whoever talks to it.
const LIBVIRTD: &str = r#"
root=$1 run=$2 image=$3
mount -t tmpfs tmpfs "$root/tmp"
mount -t tmpfs tmpfs "$root/run"
mount -t proc proc "$root/proc"
mount --bind /sys "$root/sys"
mount -o remount,bind,ro "$root/sys"
mount -t tmpfs tmpfs "$root/dev"
for device in full null random urandom zero; do
  : > "$root/dev/$device"
  mount --bind "/dev/$device" "$root/dev/$device"
done
mkdir "$root/dev/shm"
mkdir -p "$root$run"
mount --bind "$run" "$root$run"
mount --bind "$image" "$root/mnt"
for place in var/lib/libvirt var/cache/libvirt var/log/libvirt etc/libvirt; do
  mount -t tmpfs tmpfs "$root/$place"
done
cat > "$root/etc/libvirt/qemu.conf" <<'CONF'
user = "root"
group = "root"
security_driver = "none"
dynamic_ownership = 0
remember_owner = 0
namespaces = []
stdio_handler = "file"
CONF
exec chroot "$root" sh -ec "
qemu-img create -q -f qcow2 -b /mnt/root.img -F raw $run/a.qcow2
libvirtd & libvirtd=\$!
n=0
until virsh -q -c qemu:///system version; do
  sleep 0.5; n=\$((n+1)); [ \$n -lt 60 ] || exit 1
done
virsh -c qemu:///system create --validate $run/a.xml
wait \$libvirtd
"
"#;

/// The row, in a lab of its own.
pub(super) fn run(cache: &Cache, options: &Options) -> Result<Row> {
    let mut fixture = start(cache, options)?;
    fixture.attach()?;
    let mut row = drive(&mut fixture, &CLIENT, None)?;
    row.ok &= fixture.clean();
    Ok(row)
}

fn start(cache: &Cache, options: &Options) -> Result<Fixture> {
    let mut lab = Lab::prepare(cache)?;
    if options.keep {
        lab.run.keep();
    }
    let products = crate::products::for_guest(cache, Debian::Trixie)?;
    let image = lab.image(Debian::Trixie)?;
    let run = lab.run.path().to_path_buf();
    let daemon = Daemon::start(&daemon::build(cache)?, &run)?;
    daemon.cli(&["network", "add", "red"])?;
    for n in 0..2_u8 {
        daemon.add_nic(&nic(n.into()), "red", n + 1)?;
    }
    let ends = free_ports()?;
    let text = domain(&fs::read_to_string(workspace().join(DOCUMENT))?, &daemon, &run, ends)?;
    fs::write(run.join("a.xml"), text)?;

    let mut command = crate::exec::tied_private_mounts("unshare");
    command.args(["--pid", "--fork", "--kill-child", "--", "sh", "-ec", LIBVIRTD, "sh"]);
    command.arg(root(cache)?).arg(&run).arg(&image.dir);
    lab.guests.push(Guest::of_libvirt(&run, Domain { name: "a", command })?);

    let [here, there] = ends.map(|port| PathBuf::from(format!("127.0.0.1:{port}")));
    let spec = Spec {
        name: "b".into(),
        number: 2,
        cpus: 1,
        memory_mib: MEMORY_MIB,
        image,
        vhost_socket: None,
        peer: None,
        nic_args: daemon.qemu_args(&nic(1), &there, &here)?,
        words: String::new(),
        hosts: false,
        directories: Vec::new(),
        network_of: None,
    };
    lab.guests.push(Guest::start(&roots::qemu(cache)?, &run, &spec)?);
    for guest in &mut lab.guests {
        guest.wait_ready()?;
    }
    lab.deliver(&products)?;
    Ok(Fixture { daemon, builds: Vec::new(), lab, products })
}

/// Two ports that nobody has, for the two ends of the cable.
fn free_ports() -> Result<[u16; 2]> {
    let sockets = [UdpSocket::bind("127.0.0.1:0")?, UdpSocket::bind("127.0.0.1:0")?];
    Ok([sockets[0].local_addr()?.port(), sockets[1].local_addr()?.port()])
}

/// The domain of the document, for the lab.
fn domain(document: &str, daemon: &Daemon, run: &Path, [here, there]: [u16; 2]) -> Result<String> {
    let text = example(document)?;
    let socket = daemon.socket(&nic(0)).display().to_string();
    let run = run.display();
    let interface = format!(
        "<interface type='udp'>
      <mac address='{}'/>
      <source address='127.0.0.1' port='{there}'>
        <local address='127.0.0.1' port='{here}'/>
      </source>",
        mac(1)
    );
    let os = "<kernel>/mnt/vmlinuz</kernel>
    <initrd>/mnt/initrd.gz</initrd>
    <cmdline>console=ttyS0 quiet panic=0 mitigations=off no_timer_check lab.name=a \
     lab.ip=1</cmdline>
  </os>";
    let devices = format!(
        "<serial type='file'><source path='{run}/a.console'/><target port='0'/></serial>
    <serial type='unix'><source mode='bind' path='{run}/a.agent'/><target port='1'/></serial>
    <filesystem type='mount' accessmode='passthrough'>
      <source dir='{run}/a.share'/><target dir='host'/>
    </filesystem>
    <rng model='virtio'><backend model='builtin'/></rng>
  </devices>"
    );
    let there_are = [
        ("domain type='kvm'", "domain type='qemu'"),
        ("/var/lib/libvirt/images/vm1.qcow2", &format!("{run}/a.qcow2")),
        ("/run/vhost-rdma/nics/vm1/vhost.sock", &socket),
        ("</os>", os),
        ("</devices>", &devices),
        (bridge(text)?, &interface),
    ];
    let mut text = text.to_owned();
    for (there, ours) in there_are {
        ensure!(text.matches(there).count() == 1, "{DOCUMENT}: the domain has no single {there:?}");
        text = text.replace(there, ours);
    }
    let words =
        daemon.cli(&["nic", "qemu-args", &nic(0), "--netdev", "none", "--no-memory", "--json"])?;
    let mut words: Vec<String> = serde_json::from_str(&words)?;
    if let Some(device) = words.last_mut() {
        device.push_str(ADDRESS);
    }
    ensure!(
        arguments(&text) == words,
        "{DOCUMENT}: the domain's words for the device are {:?}, and the daemon prints {words:?}",
        arguments(&text)
    );
    Ok(text)
}

/// The document's domain.
fn example(document: &str) -> Result<&str> {
    let text = document.split_once("```xml\n").and_then(|(_, rest)| rest.split_once("```"));
    let (text, _) = text.with_context(|| format!("{DOCUMENT} has no XML"))?;
    ensure!(text.starts_with("<domain "), "{DOCUMENT}: its first XML is no domain");
    Ok(text)
}

/// The part of the interface that says where its frames go.
fn bridge(text: &str) -> Result<&str> {
    let (begin, end) = ("<interface type='bridge'>", "<source bridge='br0'/>");
    let from = text.find(begin);
    let to = text.find(end).map(|at| at + end.len());
    let range = from.zip(to).and_then(|(from, to)| text.get(from..to));
    range.with_context(|| format!("{DOCUMENT}: the domain has no interface on a bridge"))
}

/// The values of `qemu:arg`, in their order.
fn arguments(text: &str) -> Vec<String> {
    let parts = text.split("<qemu:arg value='").skip(1);
    parts.filter_map(|part| part.split_once('\'')).map(|(value, _)| value.to_owned()).collect()
}

/// libvirt with the QEMU of the lab.
fn root(cache: &Cache) -> Result<PathBuf> {
    let archive = Archive::open(cache, &["trixie", "trixie-backports"])?;
    let inputs = format!("1\n{}", archive.resolve(PACKAGES)?.join("\n"));
    if !cache.has("libvirt", &inputs) && archive.renew(cache)? {
        return root(cache);
    }
    let dir = cache.artefact("libvirt", &inputs, |tmp| {
        let packages = owned(PACKAGES);
        let recipe =
            Recipe { name: "libvirt", suite: "trixie", variant: "minbase", packages: &packages };
        roots::mmdebstrap(cache, &archive, &recipe, &tmp.join("root"))?;
        let mut cmd = tied("chroot");
        cmd.arg(tmp.join("root")).args(["libvirtd", "--version"]);
        run_logged(&mut cmd, "asking libvirtd", &cache.log("libvirt"), WAIT)
    })?;
    Ok(dir.join("root"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_document_has_a_domain_that_the_lab_can_use() {
        let document = fs::read_to_string(workspace().join(DOCUMENT)).unwrap();
        let text = example(&document).unwrap();
        assert!(bridge(text).unwrap().contains(&mac(1)));
        assert_eq!(arguments(text).len(), 4);
        assert!(document.contains(CLIENT.name), "the document names the row that runs it");
        assert!(example("```sh\n```\n").is_err());
    }
}
