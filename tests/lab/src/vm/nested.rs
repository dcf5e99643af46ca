//! Guests of a guest: a VM of the lab stands for the host, and QEMU runs in it.
//!
//! What the inner guests are made of is what the outer ones are made of. The host VM
//! ([`Nic::Host`](super::Nic::Host)) has QEMU's `/usr` and the image's directory as read-only
//! shares and the root file system as its second disk; QEMU runs in a chroot of those. The
//! directory of an inner guest lies in the host VM's own share, so its commands, their output and
//! its console are files of the machine that the harness runs on, two 9p servers away. Its agent's
//! line is two files there: orders, which a loop in the host VM copies into QEMU's pipe, and
//! answers. The rest of the harness sees a [`Guest`] like any other.
//!
//! Its network card is a tap. The host VM answers ARP on both sides and routes, so that 10.9.0.x is
//! one network for all of them; a bridge would take the port's addresses away, and with them the
//! GIDs of an RDMA device on it.
//!
//! Emulation in emulation is ten to twenty times slower again: waits are generous.

use std::fs;
use std::time::Duration;

use anyhow::Result;

use super::guest::machine::{self, Parts};
use super::guest::{self, Guest};

/// The inner QEMU's memory, the daemon and the programs.
pub(crate) const HOST_MEMORY_MIB: u32 = 2560;
/// One for a guest's vCPU, one for the daemon and the RNIC.
pub(super) const HOST_CPUS: u8 = 2;

/// Memory of an inner guest.
const MEMORY_MIB: u32 = 640;
const SET_UP: Duration = Duration::from_secs(120);
/// Where the lab itself runs in a VM, everything may take so many times its time.
pub(super) const PATIENCE: u32 = 16;
/// The lab's guests, its programs, and what it writes over read-only shares.
pub(super) const LAB_MEMORY_MIB: u32 = 8192;
/// From the start of an inner QEMU to its guest's init.
pub(crate) const BOOT: Duration = Duration::from_secs(2400);

/// What the host VM's kernel need not do.
pub(super) const HOST_WORDS: &str = "cryptomgr.notests nowatchdog";

/// A processor without what a kernel spends its time on: for each extension it changes more of its
/// own code, all of which the emulators then translate again. With all extensions that alone took
/// 140 s, with these and this clock 20. The clock counts instructions, 16 ns each, so that a tick
/// comes after a quarter of a million of them, however slow they are.
pub(super) const EMULATION: [&str; 6] = [
    "-accel",
    "tcg,thread=single",
    "-icount",
    "shift=4,sleep=on",
    "-cpu",
    "qemu64,+rdrand,+rdseed,+ssse3,+sse4.1,+sse4.2,+popcnt",
];

/// What an inner kernel need not do. Its self-tests of each cipher for each extension of the CPU
/// alone took over a quarter of an hour, and a watchdog takes an emulator's emulator for a lockup.
pub(super) const WORDS: &str = "cryptomgr.notests nokaslr nowatchdog random.trust_cpu=on";

/// The chroot that QEMU runs in, in the host VM. `/usr` is all that a merged-/usr system needs for
/// a program and its libraries.
const ROOT: &str = "set -e
modprobe -a tun 9p 9pnet_virtio
mkdir -p /q && mount -t tmpfs -o mode=755 q /q
mkdir -p /q/usr /q/image /q/dev /q/proc /q/run /q/host /q/tmp /q/var/tmp
for n in bin sbin lib lib64; do ln -s usr/$n /q/$n; done
mount -t 9p -o trans=virtio,version=9p2000.L,ro,cache=loose,msize=262144 qemu /q/usr
mount -t 9p -o trans=virtio,version=9p2000.L,ro,cache=loose,msize=262144 image /q/image
for n in dev proc run host; do mount --rbind /$n /q/$n; done
sysctl -q -w net.ipv4.ip_forward=1 net.ipv4.conf.eth0.proxy_arp=1 net.ipv4.conf.all.rp_filter=0 \
    net.ipv4.conf.eth0.rp_filter=0
chroot /q qemu-system-x86_64 --version
";

/// A tap whose guest has 10.9.0.@NUMBER@. Who asks from an address that is this host's too is
/// answered: flat addresses are the guest's and the port's.
const TAP: &str = "set -e
ip tuntap add tap@NUMBER@ mode tap
sysctl -q -w net.ipv4.conf.tap@NUMBER@.proxy_arp=1 net.ipv4.conf.tap@NUMBER@.rp_filter=0 \
    net.ipv4.conf.tap@NUMBER@.accept_local=1 net.ipv4.neigh.tap@NUMBER@.proxy_delay=0 \
    net.ipv4.neigh.eth0.proxy_delay=0
ip link set tap@NUMBER@ up
ip route add 10.9.0.@NUMBER@/32 dev tap@NUMBER@
";

const QEMU: &str = r#"d=/host/inner/@NAME@
mkfifo /q/tmp/@NAME@.in /q/tmp/@NAME@.out
exec 3<>/q/tmp/@NAME@.in 4<>/q/tmp/@NAME@.out
cat <&4 >> $d/answers &
( while :; do while read -r line; do echo "$line" >&3; done; sleep 0.3; done < $d/orders ) &
ulimit -l unlimited
chroot /q qemu-system-x86_64 @ARGS@ > $d/qemu.log 2>&1
echo "gone $?" >> $d/answers
"#;

/// What the host VM needs before its first guest starts.
pub(crate) fn prepare(host: &mut Guest) -> Result<()> {
    host.must(ROOT, SET_UP).map(|_| ())
}

/// An inner guest to be.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Inner<'a> {
    /// Also that of its NIC.
    pub(crate) name: &'a str,
    /// Last octet of its 10.9.0.x and of its MAC address; one that no outer guest has.
    pub(crate) number: u8,
    /// How the host's daemon is told something.
    pub(crate) cli: &'a str,
}

impl Inner<'_> {
    /// Adds a NIC with these options and starts a guest on it, which boots while this returns. Its
    /// QEMU ends with the host VM.
    pub(crate) fn start(&self, host: &mut Guest, options: &str) -> Result<Guest> {
        let Self { name, number, cli } = self;
        let mac = guest::mac(*number);
        host.must(&format!("{cli} nic add {name} --mac {mac} {options}"), SET_UP)?;
        host.must(&TAP.replace("@NUMBER@", &number.to_string()), SET_UP)?;
        let netdev = format!("--netdev tap:tap{number} --memory {MEMORY_MIB}M");
        let of_nic = host.must(&format!("{cli} nic qemu-args {name} {netdev}"), SET_UP)?;
        let share = host.share().join("inner").join(name);
        fs::create_dir_all(share.join("cmd"))?;
        for file in ["orders", "answers"] {
            fs::write(share.join(file), "")?;
        }
        let there = format!("/host/inner/{name}");
        let machine = machine::machine_args(&Parts {
            name,
            number: *number,
            cpus: 1,
            image: "/image",
            disk: "/dev/vdb",
            share: &there,
            console: &format!("{there}/console"),
            emulation: &EMULATION,
            words: WORDS,
        });
        let quoted: Vec<String> = machine.iter().map(|word| format!("'{word}'")).collect();
        let agent = format!("-chardev pipe,id=agent,path=/tmp/{name} -serial chardev:agent");
        let args = format!("{} {agent} {}", quoted.join(" "), of_nic.trim());
        host.spawn(&QEMU.replace("@NAME@", name).replace("@ARGS@", &args))?;
        Ok(Guest::inner(name, &share))
    }
}
